"""`mlora fetch` by address: messages and exit codes. By name it is tested against a real API server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mlora_operator.api.task import LoRATaskSpec
from mlora_operator.cli import exit_codes
from mlora_operator.cli.app import app
from mlora_operator.cli.fetch.adapter_of_task import access_to, spec_of
from mlora_operator.cli.fetch.command import main
from mlora_operator.cli.kube.cluster import texts_of
from mlora_operator.cli.output import CommandError

ROOT = Path(__file__).parents[5]
SHA = "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb"  # of b"a"


@pytest.fixture
def published(tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    folder.mkdir()
    names = ("adapter_config.json", "adapter_model.safetensors")
    for name in names:
        (folder / name).write_bytes(b"a")
    manifest = {
        "taskUid": "u",
        "namespace": "n",
        "name": "a",
        "fingerprint": "f",
        "baseModel": "m",
        "step": 1,
        "loss": None,
        "files": [{"name": name, "bytes": 1, "sha256": SHA} for name in names],
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def spec(**storage: object) -> LoRATaskSpec:
    return LoRATaskSpec.model_validate(
        {
            "baseModel": "m",
            "dataset": {"uri": "s3://d/a"},
            "output": {"uri": "s3://o/a"},
            "storage": {"endpoint": "http://inside:1", **storage},
        }
    )


Captured = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    "what", ["s3:/adapters/a", "./support-bot", "Support_Bot", "s3//b/a", "-", "a" * 254]
)
def test_what_is_neither_a_name_nor_an_address_is_refused_before_a_cluster_is_asked(
    what: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    assert main([what]) == exit_codes.INVALID
    assert "neither a task's name nor an address such as s3://bucket/prefix" in capsys.readouterr().err


def test_the_command_tells_its_version() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.stdout) == (0, f"mlora {version('mlora-operator')}\n")


def test_a_verified_adapter_is_told(published: Path, tmp_path: Path, capsys: Captured) -> None:
    assert main([published.as_uri(), "-d", str(tmp_path / "got")]) == 0
    assert "verified" in capsys.readouterr().out
    assert (tmp_path / "got" / "adapter_config.json").read_bytes() == b"a"


def test_json_says_what_was_fetched(published: Path, tmp_path: Path, capsys: Captured) -> None:
    main([published.as_uri(), "-d", str(tmp_path / "got"), "--output", "json"])
    said = json.loads(capsys.readouterr().out)
    assert (said["folder"], said["taskUid"], said["loss"]) == (str(tmp_path / "got"), "u", None)


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        ("manifest.json", exit_codes.NOT_FOUND),
        ("adapter_config.json", exit_codes.CORRUPT),
    ],
)
def test_what_is_missing_has_its_own_exit_code(
    published: Path, tmp_path: Path, damage: str, code: int
) -> None:
    (published / damage).unlink()
    assert main([published.as_uri(), "-d", str(tmp_path / "got")]) == code


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--uid", "u"], 0),
        (["--uid", "v"], exit_codes.NOT_FOUND),
        (["--uid", "v", "--wait"], exit_codes.TIMEOUT),
    ],
)
def test_only_the_wanted_tasks_adapter_is_taken(
    published: Path, tmp_path: Path, options: list[str], code: int
) -> None:
    assert main([published.as_uri(), "-d", str(tmp_path / "got"), "--timeout", "0s", *options]) == code
    assert (tmp_path / "got").exists() == (code == 0)


def test_a_wait_that_ends_without_an_adapter_says_so(
    published: Path, tmp_path: Path, capsys: Captured
) -> None:
    (published / "manifest.json").unlink()
    arguments = [published.as_uri(), "-d", str(tmp_path / "got"), "--wait", "--timeout", "50ms"]
    assert main(arguments) == exit_codes.TIMEOUT
    assert "gave up after 0.05 seconds: no finished adapter" in capsys.readouterr().err


def test_an_unknown_address_is_the_users_mistake(capsys: Captured) -> None:
    assert main(["ftp://x/y"]) == exit_codes.INVALID
    assert capsys.readouterr().err.startswith("error: 'ftp://x/y' is not the address of an adapter")


def test_an_unknown_duration_is_the_users_mistake(capsys: Captured) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["s3://a/b", "--timeout", "soon"])
    assert "'soon' is not a duration such as 10m" in capsys.readouterr().err


def test_the_command_line_has_one_door_to_it(published: Path, tmp_path: Path) -> None:
    done = mlora("fetch", published.as_uri(), "-d", str(tmp_path / "got"))
    assert done.returncode == 0, done.stderr
    through_app = CliRunner().invoke(app, ["fetch", published.as_uri(), "-d", str(tmp_path / "again")])
    assert through_app.exit_code == 0
    assert (tmp_path / "again" / "adapter_config.json").read_bytes() == b"a"
    assert CliRunner().invoke(app, ["fetch", "--no-such-option"]).exit_code == 2


# --- where next to nothing is installed ---


def mlora(*arguments: str, packages: Path | None = None) -> subprocess.CompletedProcess[str]:
    """`mlora` by an interpreter that sees, beside the standard library, only this project and ``packages``."""
    paths = [str(ROOT / "operator"), str(ROOT / "worker"), *([str(packages)] if packages else [])]
    return subprocess.run(
        [sys.executable, "-S", "-c", "from mlora_operator.cli import main; main()", *arguments],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_without_any_package_an_adapter_in_a_folder_is_fetched(published: Path, tmp_path: Path) -> None:
    done = mlora("fetch", published.as_uri(), "-d", str(tmp_path / "got"))
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "got" / "adapter_config.json").read_bytes() == b"a"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fetch", "s3://bucket/adapter"], "pip install boto3"),
        (
            ["fetch", "support-bot"],
            "pip install 'mlora-operator[operator]', or give the adapter's s3:// address",
        ),
        (["validate", "f.yaml"], "pip install 'mlora-operator[operator]'"),
    ],
)
def test_what_is_not_installed_is_named(arguments: list[str], words: str) -> None:
    done = mlora(*arguments)
    assert done.returncode == exit_codes.INVALID
    assert words in done.stderr


def test_the_folders_name_is_the_last_part_of_the_address(published: Path, tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from mlora_operator.cli import main; main()",
            "fetch",
            published.as_uri() + "/",
        ],
        cwd=here,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert (here / "store" / "adapter_config.json").is_file()


# --- by name ---


def test_a_tasks_store_is_reached_with_its_secret_and_another_endpoint_where_given() -> None:
    keys = {"AWS_ACCESS_KEY_ID": "k\n", "AWS_SECRET_ACCESS_KEY": " s "}
    access = access_to(spec(secretRef={"name": "x"}), keys, "http://outside:2")
    assert (access.endpoint, access.access_key, access.secret_key, access.anonymous) == (
        "http://outside:2",
        "k",
        "s",
        False,
    )


def test_a_tasks_store_is_addressed_and_trusted_as_the_task_says() -> None:
    keys = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "ca.crt": "PEM\n"}
    access = access_to(spec(secretRef={"name": "x"}, addressing="virtual"), keys, None)
    assert (access.addressing, access.ca_certificate) == ("virtual", "PEM")


def test_a_task_without_secret_is_read_anonymously() -> None:
    access = access_to(spec(), {}, None)
    assert (access.endpoint, access.anonymous) == ("http://inside:1", True)


def test_a_secret_without_keys_is_named() -> None:
    with pytest.raises(CommandError, match="secret/x has no AWS_SECRET_ACCESS_KEY"):
        access_to(spec(secretRef={"name": "x"}), {"AWS_ACCESS_KEY_ID": "k"}, None)


def test_of_a_task_of_a_newer_cluster_what_is_known_is_read() -> None:
    """Its CRD has filled in fields that this program does not know."""
    there = spec(region="eu").model_dump(mode="json", by_alias=True, exclude_none=True)
    newer = {**there, "newer": 1, "storage": {**there["storage"], "newer": {"a": 1}}}
    assert spec_of({"spec": newer}) == spec(region="eu")


def test_what_is_no_text_in_a_secret_stands_in_nobodys_way() -> None:
    secret = {"data": {"AWS_ACCESS_KEY_ID": "aWQ=", "keystore.jks": "/u3+7Q=="}}
    assert texts_of(secret) == {"AWS_ACCESS_KEY_ID": "id", "keystore.jks": ""}
    assert texts_of({}) == {}


def test_the_former_o_for_the_folder_is_still_understood(
    published: Path, tmp_path: Path, capsys: Captured
) -> None:
    assert main([published.as_uri(), "-o", str(tmp_path / "got")]) == 0
    assert "give the folder with -d DIR" in capsys.readouterr().err
    assert (tmp_path / "got" / "adapter_config.json").read_bytes() == b"a"
    assert main([published.as_uri(), "-d", str(tmp_path / "got"), "-o", "yaml"]) == exit_codes.INVALID
    assert "-o yaml: give text or json" in capsys.readouterr().err
