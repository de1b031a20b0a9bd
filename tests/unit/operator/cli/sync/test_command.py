"""`mlora sync`: what it says, how it ends, and that it needs next to nothing."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlora_operator.cli import exit_codes
from mlora_operator.cli.kube.choice import ClusterChoice
from mlora_operator.cli.output import CommandError
from mlora_operator.cli.sync.command import main, parser, sync
from mlora_operator.cli.sync.labelled_tasks import labelled_tasks
from tests.fixtures.kube_server import KubeServer
from tests.fixtures.model_server import FakeModelServer, model_server
from tests.fixtures.published import publish
from tests.fixtures.spoken import mlora as spoken

ROOT = Path(__file__).parents[5]
Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    former = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, former)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return publish(tmp_path / "store" / "bot").parent


@pytest.fixture
def server() -> Iterator[FakeModelServer]:
    with model_server() as made:
        yield made


def once(store: Path, tmp_path: Path, *more: str) -> int:
    return main([store.as_uri(), "-d", str(tmp_path / "shown"), "--once", *more])


def test_each_change_is_a_line(
    store: Path, tmp_path: Path, server: FakeModelServer, capsys: Captured
) -> None:
    to_server = ("--server", f"vllm={server.url}", "--prune")
    assert once(store, tmp_path, *to_server) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"bot verified and added from {store.as_uri()}/bot (2 files, 15 bytes, base model acme/base, 12 steps)",
        f"bot loaded into vllm at {server.url}",
    ]
    (store / "bot" / "manifest.json").unlink()
    assert once(store, tmp_path, *to_server) == 0
    assert capsys.readouterr().out.splitlines() == [
        "bot removed since the store no longer has it",
        f"bot unloaded from vllm at {server.url}",
    ]


def test_json_is_an_object_a_line(store: Path, tmp_path: Path, capsys: Captured) -> None:
    once(store, tmp_path, "-o", "json")
    assert json.loads(capsys.readouterr().out) == {
        "type": "added",
        "name": "bot",
        "place": f"{store.as_uri()}/bot",
        "message": "2 files, 15 bytes, base model acme/base, 12 steps",
    }


def test_a_once_ends_with_the_code_of_its_first_problem(
    store: Path, tmp_path: Path, capsys: Captured
) -> None:
    publish(store / "bot", files="none")
    assert once(store, tmp_path) == exit_codes.CORRUPT
    assert capsys.readouterr().err.startswith("problem: bot: manifest.json is not an adapter's manifest")
    publish(store / "bot")
    publish(tmp_path / "second" / "bot")
    assert once(store, tmp_path, (tmp_path / "second").as_uri()) == exit_codes.INVALID
    assert once(tmp_path / "nothing", tmp_path) == exit_codes.UNREACHABLE


def test_a_server_that_does_not_answer_ends_it_as_a_store_that_does_not(
    store: Path, tmp_path: Path, server: FakeModelServer
) -> None:
    server.fails = [(500, b"broken")]
    assert once(store, tmp_path, "--server", f"vllm={server.url}") == exit_codes.UNREACHABLE


def test_the_key_of_the_server_comes_from_the_environment(
    store: Path, tmp_path: Path, server: FakeModelServer, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    server.key = "k-1"
    monkeypatch.setenv("MLORA_SERVER_API_KEY", "k-1\n")
    assert once(store, tmp_path, "--server", f"vllm={server.url}") == 0
    monkeypatch.setenv("MLORA_SERVER_API_KEY", "k\n-2")
    assert once(store, tmp_path, "--server", f"vllm={server.url}") == exit_codes.INVALID
    assert "k\n-2" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give an address such as s3://bucket/prefix, or labels of tasks with -l"),
        (["ftp://x"], "is not the address of an adapter"),
        (["file:///x", "--once", "--every", "5s"], "give --once or --every, not both"),
        (["file:///x", "--every", "10ms"], "--every is at least 1s"),
        (["file:///x", "--server", "tgi=http://x"], "write vllm=URL or sglang=URL"),
        (["file:///x", "--server-dir", "adapters"], "give an absolute path"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_done(
    arguments: list[str], words: str, tmp_path: Path, capsys: Captured
) -> None:
    assert main([*arguments, "-d", str(tmp_path / "shown")]) == exit_codes.INVALID
    assert words in capsys.readouterr().err


def test_the_same_problem_is_said_once_until_it_is_over(
    store: Path, tmp_path: Path, capsys: Captured
) -> None:
    turns = iter(["wrong", "wrong", "right", "wrong", "end"])
    publish(store / "bot", files="none")

    def pause(seconds: float) -> None:
        assert seconds == 30
        turn = next(turns)
        if turn == "end":
            raise KeyboardInterrupt
        publish(store / "bot", **({"files": "none"} if turn == "wrong" else {}))

    with pytest.raises(KeyboardInterrupt):
        sync(parser().parse_args([store.as_uri(), "-d", str(tmp_path / "shown")]), pause)
    assert capsys.readouterr().err.count("problem: bot") == 2


def test_another_one_on_the_same_folder_is_refused(store: Path, tmp_path: Path, capsys: Captured) -> None:
    from mlora_operator.sync import open_folder

    with open_folder(tmp_path / "shown"):
        assert once(store, tmp_path) == exit_codes.INVALID
    assert "another `mlora sync`" in capsys.readouterr().err


def test_with_all_commands_it_is_the_same(store: Path, tmp_path: Path) -> None:
    done = spoken("sync", store.as_uri(), "-d", str(tmp_path / "shown"), "--once")
    assert (done.code, (tmp_path / "shown" / "bot" / "manifest.json").exists()) == (0, True)


# --- where next to nothing is installed ---


def bare(*arguments: str) -> list[str]:
    return [sys.executable, "-S", "-c", "from mlora_operator.cli import main; main()", *arguments]


BARE = {
    "PATH": "/usr/bin:/bin",
    "PYTHONPATH": os.pathsep.join([str(ROOT / "operator"), str(ROOT / "worker")]),
}


def test_without_any_package_a_folder_and_a_server_are_kept_in_step(
    store: Path, tmp_path: Path, server: FakeModelServer
) -> None:
    command = bare(
        "sync", store.as_uri(), "-d", str(tmp_path / "shown"), "--server", f"vllm={server.url}", "--once"
    )
    done = subprocess.run(command, env=BARE, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert set(server.adapters) == {"bot"}


def test_what_is_not_installed_is_named(tmp_path: Path) -> None:
    for what, words in (
        (["s3://b/p"], "pip install boto3"),
        (["-l", "a=b"], "pip install 'mlora-operator[operator]'"),
    ):
        command = bare("sync", *what, "-d", str(tmp_path))
        done = subprocess.run(command, env=BARE, capture_output=True, text=True, timeout=60)
        assert done.returncode == exit_codes.INVALID
        assert words in done.stderr


def test_the_loop_ends_when_its_container_does(store: Path, tmp_path: Path) -> None:
    command = bare("sync", store.as_uri(), "-d", str(tmp_path / "shown"), "--every", "1h")
    with subprocess.Popen(command, env=BARE, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline().startswith("bot verified and added")
        time.sleep(0.1)
        running.terminate()
        assert running.wait(10) == 0


# --- tasks of a cluster ---


def succeeded(kube: KubeServer, name: str, store: Path, namespace: str = "team", **more: Any) -> None:
    status = {
        "state": "Succeeded",
        "conditions": [{"type": "Succeeded", "status": "True"}],
        "adapter": {"uri": f"{store.as_uri()}/{name}"},
    }
    storage = {"storage": {"endpoint": "http://store:1", **more}}
    kube.task(name, status, namespace, **storage)["metadata"]["labels"] = {"serve": "yes"}


def test_tasks_with_a_label_are_followed(kube: KubeServer, tmp_path: Path, capsys: Captured) -> None:
    store = tmp_path / "store"
    for name in ("bot", "other", "far"):
        publish(store / name, taskUid=f"uid-{name}")
    succeeded(kube, "bot", store)
    succeeded(kube, "far", store, "elsewhere")
    kube.task("other", {"state": "Succeeded"})
    folder = tmp_path / "shown"
    assert main(["-l", "serve=yes", "-d", str(folder), "--once"]) == 0
    assert [path.name for path in folder.iterdir() if path.name[0] != "."] == ["bot"]
    assert main(["-l", "serve=yes", "-A", "-d", str(folder), "--once"]) == 0
    assert sorted(path.name for path in folder.iterdir() if path.name[0] != ".") == ["bot", "far"]
    assert capsys.readouterr().err == ""


def test_the_adapter_of_another_task_is_not_taken_for_it(
    kube: KubeServer, tmp_path: Path, capsys: Captured
) -> None:
    publish(tmp_path / "store" / "bot", taskUid="uid-former")
    succeeded(kube, "bot", tmp_path / "store")
    assert main(["-l", "serve=yes", "-d", str(tmp_path / "shown"), "--once"]) == exit_codes.NOT_FOUND
    assert "it is of another task" in capsys.readouterr().err


def test_a_task_that_trains_again_keeps_what_is_shown(kube: KubeServer, tmp_path: Path) -> None:
    store = tmp_path / "store"
    publish(store / "bot", taskUid="uid-bot")
    succeeded(kube, "bot", store)
    arguments = ["-l", "serve=yes", "-d", str(tmp_path / "shown"), "--once", "--prune"]
    assert main(arguments) == 0
    kube.task("bot", {"state": "Training"})["metadata"]["labels"] = {"serve": "yes"}
    assert main(arguments) == 0
    assert (tmp_path / "shown" / "bot").exists()
    del kube.objects["loratasks", "team", "bot"]
    assert main(arguments) == 0
    assert not (tmp_path / "shown" / "bot").exists()


def test_the_keys_of_a_task_are_those_of_its_own_namespace(kube: KubeServer, tmp_path: Path) -> None:
    keys = {"AWS_ACCESS_KEY_ID": "own", "AWS_SECRET_ACCESS_KEY": "s"}
    kube.has("secrets", "keys", {}, namespace="elsewhere")["data"] = {
        name: base64.b64encode(value.encode()).decode() for name, value in keys.items()
    }
    succeeded(kube, "far", tmp_path, "elsewhere", secretRef={"name": "keys"})
    succeeded(kube, "bot", tmp_path, "team", secretRef={"name": "keys"})
    found = labelled_tasks("serve=yes", ClusterChoice(), True, None)
    assert [one.name for one in found.found] == ["far"]
    assert found.held == {"bot"}  # there is no such Secret in its namespace
    assert "secret/keys cannot be read" in found.problems[0].message


def test_a_cluster_that_does_not_answer_ends_a_once_and_no_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    arguments = ["-l", "a=b", "-d", str(tmp_path / "shown")]
    assert main([*arguments, "--once"]) == exit_codes.UNREACHABLE
    capsys.readouterr()

    def pause(_: float) -> None:
        raise CommandError("paused", 99)

    with pytest.raises(CommandError, match="paused"):
        sync(parser().parse_args(arguments), pause)
    assert capsys.readouterr().err.startswith("problem: the cluster: no kubeconfig at /nowhere")
