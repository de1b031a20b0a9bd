"""The client against an API server, and, as far as nothing is trained, on this machine."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mlora
from mlora import Client, LoRASpec, LoRATaskSpec
from mlora.local_backend import LocalBackend
from mlora.manifests import task_text
from mlora_operator.cli.run.command import run
from mlora_operator.local.adapt import adapt
from mlora_operator.local.machine import this_machine
from mlora_operator.local.manifests import read_manifests
from tests.fixtures.kube_server import KubeServer
from tests.fixtures.published import publish

SPEC: dict[str, Any] = {
    "baseModel": "acme/base",
    "dataset": {"uri": "s3://d/a.jsonl", "format": "promptCompletion"},
    "output": {"uri": "s3://adapters/bot"},
}
SUCCEEDED = {
    "state": "Succeeded",
    "conditions": [
        {
            "type": "Succeeded",
            "status": "True",
            "reason": "Succeeded",
            "message": "done",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }
    ],
}
HISTORY = (
    b'{"step": 1, "loss": 2.5, "learningRate": 0.1, "gradNorm": 1.0, "tokens": 10}\n'
    b'{"step": 1, "evaluationLoss": 2.25, "perplexity": 9.5, "tokenAccuracy": 0.5, "tokens": 20}\n'
)


def finished(kube: KubeServer, folder: Path) -> Path:
    store = publish(folder / "bot", taskUid="uid-bot")
    (store / "history.jsonl").write_bytes(HISTORY)
    manifest = json.loads((store / "manifest.json").read_text())
    entry = {"name": "history.jsonl", "bytes": len(HISTORY), "sha256": hashlib.sha256(HISTORY).hexdigest()}
    manifest["files"].append(entry)
    (store / "manifest.json").write_text(json.dumps(manifest))
    kube.task(
        "bot",
        SUCCEEDED | {"adapter": {"uri": store.as_uri(), "sha256": "0" * 64, "bytes": 7}},
        storage={"endpoint": "http://x:1"},
    )
    return store


# --- a cluster ---


@pytest.mark.parametrize("typed", [True, False])
def test_a_task_is_submitted_as_its_manifest_would_be(kube: KubeServer, typed: bool) -> None:
    spec: Any = SPEC | {"lora": {"rank": 8}}
    if typed:
        spec = LoRATaskSpec(
            base_model="acme/base",
            dataset={"uri": "s3://d/a.jsonl", "format": "promptCompletion"},
            output={"uri": "s3://adapters/bot"},
            lora=LoRASpec(rank=8),
        )
    assert Client().submit("bot", spec, labels={"team": "search"}) == "bot"
    stored = kube.objects["loratasks", "team", "bot"]
    assert stored["spec"] == SPEC | {"lora": {"rank": 8}}  # no default is written down
    assert stored["metadata"]["labels"] == {"team": "search"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lora": {"rank": 0}}, "spec.lora.rank: Input should be greater than or equal to 1"),
        ({"lora": {"ranks": 8}}, "did you mean rank"),
        ({"output": object()}, "the spec must be plain data"),
        ({"training": {"learningRate": float("nan")}}, "the spec must be plain data"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_asked(
    kube: KubeServer, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(mlora.InvalidInput) as raised:
        Client().submit("bot", SPEC | change)
    assert words in str(raised.value)
    assert kube.asked == []


def test_a_name_that_is_a_path_is_refused(kube: KubeServer) -> None:
    with pytest.raises(mlora.InvalidInput, match=r"metadata\.name"):
        Client().submit("../secrets/x", SPEC)
    assert kube.asked == []


@pytest.mark.usefixtures("kube")
def test_manifest_files_are_submitted_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "tasks.yaml"
    manifest = {
        "apiVersion": "mlora.dev/v1alpha1",
        "kind": "LoRATask",
        "metadata": {"name": "a"},
        "spec": SPEC,
    }
    file.write_text(json.dumps(manifest))
    assert Client().submit_files(file) == ["a"]
    with pytest.raises(mlora.InvalidInput, match="No such file"):
        Client().submit_files(tmp_path / "nothing.yaml")


@pytest.mark.usefixtures("kube")
def test_a_task_of_another_spec_is_not_replaced_unasked() -> None:
    Client().submit("bot", SPEC)
    Client().submit("bot", SPEC)
    with pytest.raises(mlora.TaskRefused, match="lora"):
        Client().submit("bot", SPEC | {"lora": {"rank": 4}})


def test_a_wait_ends_with_the_statuses(kube: KubeServer, capsys: pytest.CaptureFixture[str]) -> None:
    task = kube.task("bot", {"state": "Training", "step": 1, "totalSteps": 2})

    def end() -> None:
        time.sleep(0.3)
        task["status"] = SUCCEEDED | {"step": 2, "loss": "1.5"}
        kube.turns.append(task)

    threading.Thread(target=end).start()
    found = Client().wait("bot", timeout="20s", progress=True)
    assert (found["bot"].state, found["bot"].step, found["bot"].loss) == ("Succeeded", 2, "1.5")
    assert "bot: Training\nbot: Succeeded\n" in capsys.readouterr().err


def test_a_task_that_fails_is_raised_with_its_reason(kube: KubeServer) -> None:
    failed = {"type": "Failed", "status": "True", "reason": "InvalidRow", "message": "line 3: no answer"}
    kube.task("bot", {"state": "Failed", "conditions": [failed]})
    with pytest.raises(mlora.TaskNotSuccessful, match="loratask/bot failed: InvalidRow: line 3: no answer"):
        Client().wait("bot", progress=False)


def test_a_wait_that_is_too_long_says_what_is_left(kube: KubeServer) -> None:
    kube.task("bot", {"state": "Training"})
    with pytest.raises(mlora.TimedOut, match=r"within 0.2 seconds; still in the cluster: bot"):
        Client().wait("bot", timeout=0.2, progress=False)
    with pytest.raises(mlora.InvalidInput, match="timeout='soon'"):
        Client().wait("bot", timeout="soon")
    with pytest.raises(mlora.InvalidInput, match="needs the name of a task"):
        Client().wait()


def test_logs_are_conditions_events_and_progress_in_the_order_of_time(kube: KubeServer) -> None:
    kube.task("bot", {"state": "Training", "step": 3, "totalSteps": 9, "conditions": [
        {"type": "Accepted", "status": "True", "reason": "Served", "message": "pipeline x serves it",
         "lastTransitionTime": "2026-01-01T00:00:02Z"}]})  # fmt: skip
    event = {
        "involvedObject": {"uid": "uid-bot"},
        "reason": "RowsTruncated",
        "message": "2 rows",
        "type": "Warning",
    }
    kube.objects["events", "team", "e"] = {
        "metadata": {"name": "e", "namespace": "team"}, "lastTimestamp": "2026-01-01T00:00:01Z", **event
    }  # fmt: skip
    lines = Client().logs("bot")
    assert [line.kind for line in lines] == ["event", "condition", "progress"]
    assert str(lines[0]) == "2026-01-01 00:00:01  RowsTruncated: 2 rows"
    kube.refused.add("events")
    assert [line.kind for line in Client().logs("bot")] == ["condition", "progress"]


def test_losses_are_the_rows_of_the_history(kube: KubeServer, tmp_path: Path) -> None:
    store = finished(kube, tmp_path)
    rows = Client().losses("bot")
    assert rows == [json.loads(line) for line in HISTORY.splitlines()]
    pandas = pytest.importorskip("pandas")
    frame = Client().loss_frame("bot")
    assert isinstance(frame, pandas.DataFrame)
    assert frame["loss"].dropna().tolist() == [2.5]
    (store / "history.jsonl").write_bytes(HISTORY.replace(b"2.5", b"2.4"))
    with pytest.raises(mlora.AdapterDamaged, match=r"history\.jsonl does not match"):
        Client().losses("bot")


def test_an_adapter_is_fetched_and_verified(kube: KubeServer, tmp_path: Path) -> None:
    store = finished(kube, tmp_path)
    folder = Client().fetch("bot", tmp_path / "got")
    assert (folder / "adapter_model.safetensors").read_bytes() == b"weights"
    (store / "adapter_model.safetensors").write_bytes(b"wEights")
    with pytest.raises(mlora.AdapterDamaged):
        Client().fetch("bot", tmp_path / "again")
    kube.task("young", {"state": "Training"})
    with pytest.raises(mlora.AdapterMissing, match="has no adapter yet: it is Training"):
        Client().fetch("young")


def test_tasks_are_listed_and_deleted(kube: KubeServer) -> None:
    kube.task("a", SUCCEEDED)
    kube.task("b")["metadata"]["labels"] = {"team": "search"}
    kube.task("far", namespace="other")
    assert {name: status.state for name, status in Client().list().items()} == {"a": "Succeeded", "b": None}
    assert list(Client("other").list()) == ["far"]
    assert list(Client().list("team=search")) == ["b"]
    with pytest.raises(mlora.AdapterMissing, match="no loratask 'c'"):
        Client().delete("a", "c")
    Client().delete("a", "b")
    assert list(Client().list()) == []


def test_a_status_that_is_none_is_an_error_of_ours(kube: KubeServer) -> None:
    kube.task("bot", {"step": "many"})
    with pytest.raises(mlora.MloraError, match="the status of loratask/bot cannot be read: step"):
        Client().status("bot")


def test_a_cluster_that_is_not_there_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    with pytest.raises(mlora.NotReachable, match="no kubeconfig at /nowhere"):
        Client().status("bot")


def test_in_a_notebook_a_loop_runs_already(kube: KubeServer, tmp_path: Path) -> None:
    finished(kube, tmp_path)

    async def cell() -> Path:
        Client().wait("bot", progress=False)
        return Client().fetch("bot", tmp_path / "got")

    assert (asyncio.run(cell()) / "manifest.json").is_file()


# --- this machine ---


def test_on_this_machine_a_task_is_checked_when_it_is_submitted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    client = Client.local({"acme/base": tmp_path}, state=tmp_path / "state")
    with pytest.raises(mlora.InvalidInput, match=r'is not known: add models={"acme/other": "FOLDER"}'):
        client.submit("bot", SPEC | {"baseModel": "acme/other"})
    with pytest.raises(mlora.InvalidInput, match=r"spec.lora.rank"):
        client.submit("bot", SPEC | {"lora": {"rank": 0}})
    assert client.submit("bot", SPEC) == "bot"
    with pytest.raises(mlora.InvalidInput, match="writes to the same place"):
        client.submit("other", SPEC)
    assert client.submit("bot", SPEC, labels={"team": "search"}) == "bot"
    assert client.submit("bot", SPEC) == "bot"
    with pytest.raises(mlora.TaskRefused, match="submitted already with another spec"):
        client.submit("bot", SPEC | {"priority": 3})
    client.submit("bot", SPEC | {"priority": 3}, replace=True)
    with pytest.raises(mlora.AdapterMissing, match="has not trained yet"):
        client.status("bot")
    client.delete("bot")
    with pytest.raises(mlora.AdapterMissing, match="no loratask 'bot' was submitted here"):
        client.wait("bot")
    with pytest.raises(mlora.InvalidInput, match="labels select tasks of a cluster only"):
        client.list("a=b")


def test_of_a_file_of_several_objects_each_is_replaced_and_deleted_by_itself(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    client = Client.local({"acme/base": tmp_path}, state=tmp_path / "state")
    specs = {
        name: SPEC | {"output": {"uri": f"s3://adapters/{name}"}, "storage": {"secretRef": {"name": "keys"}}}
        for name in ("one", "two")
    }
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "keys"},
        "stringData": {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"},
    }
    file = tmp_path / "both.yaml"
    file.write_text(
        "\n---\n".join([json.dumps(secret), *(task_text(*one, None)[1] for one in specs.items())])
    )
    assert client.submit_files(file) == ["one", "two"] == client.submit_files(file)
    backend = client._backend
    assert isinstance(backend, LocalBackend)

    def left() -> dict[str, int]:
        found = backend._world(backend._given, ("one", "two"))
        assert [key.name for key in found.secrets] == ["keys"]
        return {task["metadata"]["name"]: task["spec"]["priority"] for task in found.tasks}

    client.submit("one", specs["one"] | {"priority": 3}, replace=True)
    assert left() == {"one": 3, "two": 0}
    client.submit_files(file, replace=True)
    assert left() == {"one": 0, "two": 0}
    client.delete("one", "one")
    assert left() == {"two": 0}
    client.delete("two")
    client.submit("one", specs["one"])
    assert left() == {"one": 0}


def test_what_does_not_make_a_run_is_said_at_once() -> None:
    with pytest.raises(mlora.InvalidInput, match="is not the folder of a model"):
        Client.local({"acme/base": "/m"})
    for given, words in (
        ({"stages": 65}, r"^stages: .*64 \(got 65\)"),
        ({"threads": 1025}, r"threads: .*1024 \(got 1025\)"),
    ):
        wrong: Any = given
        with pytest.raises(mlora.InvalidInput, match=words):
            Client.local({"acme/base": "hf://acme/base"}, **wrong).submit("bot", SPEC)
    with pytest.raises(mlora.InvalidInput, match="s3_endpoint=nonsense: "):
        Client.local({"acme/base": "hf://acme/base"}, s3_endpoint="nonsense").submit("bot", SPEC)


# --- arguments ---


def nested() -> dict[str, Any]:
    spec: dict[str, Any] = {}
    for _ in range(100_000):
        spec = {"a": spec}
    return spec


LOCAL: Any = Client.local
CALLS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "models as a list": (lambda _: LOCAL(["/x"]), "models is of type list: give a dict"),
    "a model that is no path": (lambda _: LOCAL({"a": 5}), "give a path"),
    "a model without a name": (lambda _: LOCAL({5: "/x"}), "models: 5 is not a name"),
    "secrets as a list": (lambda _: LOCAL(secrets=["x"]), "secrets is of type list: give a dict"),
    "a secret that is text": (
        lambda _: LOCAL(secrets={"x": "hush"}),
        r"^secrets\['x'\] is of type str: give a dict",
    ),
    "a value that is a number": (
        lambda _: LOCAL(secrets={"x": {"y": 5}}),
        r"^secrets\['x'\]\['y'\] is not text",
    ),
    "a state that is no path": (lambda _: LOCAL(state=5), "state=5: give a path"),
    "stages": (lambda _: LOCAL(stages=0), "stages=0: give a whole number"),
    "threads": (lambda _: LOCAL(threads="x"), "threads='x': give a whole number"),
    "dtype": (lambda _: LOCAL(dtype="float8"), "dtype='float8': give one of None, 'float32'"),
    "device": (lambda _: LOCAL(device=["cpu"]), "device=.*give one of 'auto'"),
    "quantization": (
        lambda _: LOCAL(quantization="int3"),
        "quantization='int3': give one of None, 'none', 'nf4'",
    ),
    "restarts": (lambda _: LOCAL(restarts=-1), "restarts=-1: give a whole number from 0 on"),
    "a list of names": (lambda client: client.wait(["bot"]), "not the name of a task"),
    "a status": (lambda client: client.status(["bot"]), "not the name of a task"),
    "logs": (lambda client: client.logs({}), "not the name of a task"),
    "losses": (lambda client: client.losses([1]), "not the name of a task"),
    "an adapter": (lambda client: client.fetch([1]), "not the name of a task"),
    "a folder": (lambda client: client.fetch("bot", 5), "folder=5: give a path"),
    "a deletion": (lambda client: client.delete(["bot"]), "not the name of a task"),
    "a selector": (lambda client: client.list({"a": "b"}), "give a selector as text"),
    "labels as text": (
        lambda client: client.submit("bot", SPEC, labels="x=y"),
        "labels is of type str: give a dict",
    ),
    "a label's key": (lambda client: client.submit("bot", SPEC, labels={"a b": "x"}), "'a b' is not the key"),
    "a label's value": (
        lambda client: client.submit("bot", SPEC, labels={"a": "x y"}),
        "'x y' is not the value",
    ),
    "a spec without end": (lambda client: client.submit("bot", nested()), "must be plain data"),
    "before now": (lambda client: client.wait("bot", timeout=-1), "timeout=-1: give seconds"),
    "no number": (lambda client: client.wait("bot", timeout=float("nan")), "timeout=nan: give seconds"),
    "for ever": (lambda client: client.wait("bot", timeout="9" * 400), "give seconds"),
    "a list of seconds": (lambda client: client.wait("bot", timeout=[1]), "give seconds"),
}


@pytest.mark.parametrize("where", ["cluster", "here"])
@pytest.mark.parametrize("call", CALLS)
def test_an_argument_that_makes_no_sense_is_invalid_input(
    kube: KubeServer, tmp_path: Path, call: str, where: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    client = (
        Client() if where == "cluster" else Client.local({"acme/base": tmp_path}, state=tmp_path / "state")
    )
    make, words = CALLS[call]
    with pytest.raises(mlora.InvalidInput, match=words):
        make(client)
    assert kube.asked == []


@pytest.mark.usefixtures("kube")
def test_labels_that_the_api_server_takes_are_taken() -> None:
    assert Client().submit("bot", SPEC, labels={"example.com/team": "a.b_c-D", "empty": ""}) == "bot"


# --- what it is made of ---


def test_it_loads_neither_torch_nor_the_clusters_client() -> None:
    ask = "import mlora, sys; print(sys.modules.keys() & {'torch', 'transformers', 'pandas', 'kopf'})"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_a_client_of_this_machine_takes_what_mlora_run_takes() -> None:
    """But for what belongs to a command alone: its files, its output, and what ``wait`` and the methods are given."""
    theirs, ours = inspect.signature(run).parameters, inspect.signature(Client.local).parameters
    of_a_command = {"files", "output", "timeout", "timeline", "page"}
    same = {"model": "models"}
    expected = {same.get(name, name) for name in theirs.keys() - of_a_command}
    assert ours.keys() - {"secrets"} == expected
    assert {name: ours[name].default for name in expected} == {
        same.get(name, name): one.default for name, one in theirs.items() if name not in of_a_command
    }


def test_each_option_of_this_machine_reaches_the_run(tmp_path: Path) -> None:
    """By the pipeline that is made of it."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    client = Client.local(
        {"acme/base": tmp_path / "model"},
        stages=3,
        dtype="bfloat16",
        quantization="int8",
        threads=2,
        s3_endpoint="http://127.0.0.1:9",
        restarts=7,
    )
    backend = client._backend
    assert isinstance(backend, LocalBackend)
    options = backend._options
    (made,) = adapt(read_manifests([task_text("bot", SPEC, None)]), options, this_machine({})).settings.models
    assert (made.stages, made.dtype, made.quantization.type, made.restarts.limit) == (
        3,
        "bfloat16",
        "int8",
        7,
    )
    assert (made.worker.threads, made.storage.endpoint) == (2, "http://127.0.0.1:9")
