"""The stand-ins behave as what they stand in for: versions at the API server, restarts at the kubelet."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from bench.chaos_parts.api import ApiServer, Conflict
from bench.chaos_parts.kubelet import Kubelet
from bench.chaos_parts.processes import OnEnd, Process
from mlora_operator.reconcile.ports import Gone
from mlora_operator.reconcile.state.snapshot import Key
from mlora_worker.protocol import ModelSource, WorkerConfig

KEY = Key("chaos", "one")


def status(type_: str) -> dict[str, object]:
    return {"conditions": [{"type": type_, "status": "True"}]}


def test_a_status_is_written_upon_the_version_that_was_seen() -> None:
    api = ApiServer()
    uid = api.create("LoRATask", KEY, {})
    [seen] = api.of_kind("LoRATask")
    version = seen["metadata"]["resourceVersion"]
    api.patch_status("LoRATask", KEY, uid, version, {"step": 1})
    with pytest.raises(Conflict):
        api.patch_status("LoRATask", KEY, uid, version, {"step": 2})
    with pytest.raises(Gone):
        api.patch_status("LoRATask", KEY, "another", version, {"step": 2})
    assert [raw["status"] for raw in api.of_kind("LoRATask")] == [{"step": 1}]
    assert seen["status"] == {}, "who holds the former object keeps it"


def test_a_task_that_goes_back_from_its_end_is_told() -> None:
    api = ApiServer()
    uid = api.create("LoRATask", KEY, {})
    for change in (status("Succeeded"), status("Running")):
        [seen] = api.of_kind("LoRATask")
        api.patch_status("LoRATask", KEY, uid, seen["metadata"]["resourceVersion"], change)
    assert api.broken == ["chaos/one went back from Succeeded"]


def test_a_watch_returns_with_the_next_change_or_after_its_time() -> None:
    api = ApiServer()
    assert api.wait(0, 0.01) == 0
    api.create("LoRATask", KEY, {})
    assert api.wait(0, 10) == 1


class FakeProcess(Process):
    """Ends when it is signalled."""

    def send(self, number: signal.Signals) -> None:
        if self.code is None:
            self.code = 0 if number is signal.SIGTERM else -number
            assert self.on_end is not None
            self.on_end(self)


class FakeProcesses:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[FakeProcess] = []
        self.environments: list[Mapping[str, str]] = []

    def start(
        self, what: str, environment: Mapping[str, str], log: str, on_end: OnEnd | None = None
    ) -> Process:
        (self.folder / log).write_text("its last words\n")
        self.started.append(FakeProcess(what, self.folder / log, on_end))
        self.environments.append(environment)
        return self.started[-1]


@pytest.fixture
def processes(tmp_path: Path) -> FakeProcesses:
    return FakeProcesses(tmp_path)


@pytest.fixture
def kubelet(processes: FakeProcesses, tmp_path: Path) -> Kubelet:
    made = Kubelet(
        processes,
        Key("chaos", "tiny"),
        ModelSource(name="tiny", uri="s3://models/tiny", dtype="float32"),
        2,
        16,
        "http://127.0.0.1:1",
        ("access", "secret"),
        tmp_path / "private",
        lambda: None,
        pause=0.0,
    )
    made.resize(2)
    return made


def pods(kubelet: Kubelet) -> list[tuple[str, int, int | None]]:
    group = kubelet.group()
    assert group is not None
    return [(pod.uid, pod.restarts, pod.ended.code if pod.ended else None) for pod in group.pods]


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.usefixtures("kubelet")
def test_every_rank_is_started_with_its_number_and_all_but_its_disk_is_the_same(
    processes: FakeProcesses,
) -> None:
    assert [one["MLORA_RANK"] for one in processes.environments] == ["0", "1"]
    first, second = (
        WorkerConfig.model_validate_json(one["MLORA_WORKER_CONFIG"]) for one in processes.environments
    )
    assert first.cache_dir != second.cache_dir
    assert first == second.model_copy(update={"cache_dir": first.cache_dir})


def test_a_process_that_ends_is_started_again_in_its_pod(kubelet: Kubelet, processes: FakeProcesses) -> None:
    processes.started[1].send(signal.SIGKILL)
    assert pods(kubelet) == [("tiny-0.1", 0, None), ("tiny-1.2", 1, 137)]
    until(lambda: len(processes.started) == 3)
    assert kubelet.process(1) is processes.started[2]
    group = kubelet.group()
    assert group is not None
    assert [pod.ended.words for pod in group.pods if pod.ended] == ["exit code -9: its last words"]


def test_a_pod_that_is_deleted_gives_way_to_another_one(kubelet: Kubelet, processes: FakeProcesses) -> None:
    kubelet.delete("tiny-1.2")
    assert pods(kubelet) == [("tiny-0.1", 0, None), ("tiny-1.3", 0, None)]
    assert processes.started[1].code == 0


def test_without_replicas_there_is_no_group(kubelet: Kubelet) -> None:
    kubelet.resize(0)
    assert kubelet.group() is None
