"""`mlora fetch` by address: messages and exit codes. By name it is tested against a real API server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mlora_operator.api.task import LoRATaskSpec
from mlora_operator.cli import exit_codes
from mlora_operator.cli.app import app
from mlora_operator.cli.fetch import access_to
from mlora_operator.cli.output import CommandError

SHA = "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb"  # of b"a"


@pytest.fixture
def published(tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    folder.mkdir()
    (folder / "adapter_config.json").write_bytes(b"a")
    manifest = {
        "taskUid": "u",
        "namespace": "n",
        "name": "a",
        "fingerprint": "f",
        "baseModel": "m",
        "step": 1,
        "loss": None,
        "files": [{"name": "adapter_config.json", "bytes": 1, "sha256": SHA}],
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


def test_a_verified_adapter_is_told(published: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["fetch", published.as_uri(), "-o", str(tmp_path / "got")])
    assert result.exit_code == 0
    assert "verified" in result.stdout
    assert (tmp_path / "got" / "adapter_config.json").read_bytes() == b"a"


def test_json_says_what_was_fetched(published: Path, tmp_path: Path) -> None:
    arguments = ["fetch", published.as_uri(), "-o", str(tmp_path / "got"), "--output", "json"]
    said = json.loads(CliRunner().invoke(app, arguments).stdout)
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
    result = CliRunner().invoke(app, ["fetch", published.as_uri(), "-o", str(tmp_path / "got")])
    assert isinstance(result.exception, CommandError)
    assert result.exception.exit_code == code


def test_an_unknown_address_is_the_users_mistake() -> None:
    result = CliRunner().invoke(app, ["fetch", "ftp://x/y"])
    assert isinstance(result.exception, CommandError)
    assert result.exception.exit_code == exit_codes.INVALID


def test_a_tasks_store_is_reached_with_its_secret_and_another_endpoint_where_given() -> None:
    keys = {"AWS_ACCESS_KEY_ID": "k\n", "AWS_SECRET_ACCESS_KEY": " s "}
    access = access_to(spec(secretRef={"name": "x"}), keys, "http://outside:2")
    assert (access.endpoint, access.access_key, access.secret_key, access.anonymous) == (
        "http://outside:2",
        "k",
        "s",
        False,
    )


def test_a_task_without_secret_is_read_anonymously() -> None:
    access = access_to(spec(), {}, None)
    assert (access.endpoint, access.anonymous) == ("http://inside:1", True)


def test_a_secret_without_keys_is_named() -> None:
    with pytest.raises(CommandError, match="secret/x has no AWS_SECRET_ACCESS_KEY"):
        access_to(spec(secretRef={"name": "x"}), {"AWS_ACCESS_KEY_ID": "k"}, None)
