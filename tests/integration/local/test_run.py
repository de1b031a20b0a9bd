"""``mlora run``'s machinery with real processes and real HTTP; only the training is pretended."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from mlora_operator.local import ending
from mlora_operator.local.adapt import RunInputs, RunOptions, adapt
from mlora_operator.local.ending import End, Result
from mlora_operator.local.machine import Machine
from mlora_operator.local.manifests import read_manifests
from mlora_operator.local.run import run
from mlora_operator.local.run_environment import RunEnvironment
from mlora_operator.reconcile.admission import model_requests
from mlora_operator.reconcile.state.decision import Event

pytestmark = pytest.mark.integration

WORKER = Path(__file__).with_name("fake_worker.py")

TASK = """\
apiVersion: mlora.dev/v1alpha1
kind: LoRATask
metadata: {{name: {name}}}
spec:
  baseModel: m
  priority: {priority}
  dataset: {{uri: s3://data/{name}.jsonl}}
  training: {{maxSteps: {steps}}}
  output: {{uri: s3://adapters/{name}}}
  storage: {{endpoint: "http://in-cluster:8333", secretRef: {{name: keys}}}}
---
"""
SECRET = """\
apiVersion: v1
kind: Secret
metadata: {name: keys}
stringData: {AWS_ACCESS_KEY_ID: the-key, AWS_SECRET_ACCESS_KEY: the-secret}
---
"""


@dataclass
class Heard:
    """An audience that remembers."""

    tasks: list[dict[str, Any]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def task_changed(self, task: Mapping[str, Any]) -> None:
        self.tasks.append(json.loads(json.dumps(task)))

    def happened(self, event: Event) -> None:
        self.events.append(event)

    def states(self, name: str) -> list[str]:
        found = [one.get("status", {}).get("state") for one in self.tasks if one["metadata"]["name"] == name]
        return [state for index, state in enumerate(found) if state and found[index - 1 : index] != [state]]


@dataclass
class Bench:
    """One run's folder, and what the fake workers noted there."""

    home: Path
    heard: Heard = field(default_factory=Heard)

    def script(self, **content: Any) -> None:
        (self.home / "script.json").write_text(json.dumps(content))

    def place(
        self, gpus: tuple[str, ...] = (), timeline: Path | None = None, page: int | None = None
    ) -> RunEnvironment:
        return RunEnvironment(
            state=self.home / "state",
            cache=self.home / "cache",
            machine=Machine(cpus=2, memory_bytes=8 << 30, gpus=gpus),
            environment={**os.environ, "FAKE_HOME": str(self.home)},
            command=(sys.executable, str(WORKER)),
            timeline=timeline,
            page=page,
        )

    async def run(self, world: RunInputs, **place: Any) -> dict[str, End]:
        ends = await asyncio.wait_for(run(world, self.place(**place), self.heard), 60)
        return {end.name: end for end in ends}

    def noted(self, name: str) -> list[str]:
        file = self.home / name
        return file.read_text().split() if file.exists() else []

    def alive(self) -> list[int]:
        return [
            int(pid)
            for pid in self.noted("pids")
            if Path(f"/proc/{pid}/stat").exists() and not is_zombie(pid)
        ]


async def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not true() and time.monotonic() < deadline:  # noqa: ASYNC110 - files tell no one
        await asyncio.sleep(0.05)


def is_zombie(pid: str) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    made = Bench(tmp_path)
    made.script()
    return made


def world(*names: str, steps: int = 4, text: str = SECRET, **wishes: Any) -> RunInputs:
    tasks = "".join(
        TASK.format(name=name, priority=10 * index, steps=steps) for index, name in enumerate(names)
    )
    manifests = read_manifests([("f.yaml", tasks + text)])
    assert manifests.problems == ()
    given = RunOptions(**{"models": {"m": "file:///models/m"}, "device": "cpu", **wishes})
    return adapt(manifests, given, Machine(cpus=2, memory_bytes=8 << 30))


async def test_all_tasks_train_and_all_processes_end(bench: Bench) -> None:
    bench.script(step_seconds=0.2)
    ends = await bench.run(world("a", "b", "c", stages=2, s3_endpoint="http://127.0.0.1:1"))
    assert {name: end.result for name, end in ends.items()} == dict.fromkeys("abc", Result.SUCCEEDED)
    assert len(bench.noted("pids")) == 2
    assert bench.alive() == []
    assert sorted(bench.noted("trained")) == ["default/a", "default/b", "default/c"]
    assert set(bench.noted("keys")) == {"the-key"}
    assert set(bench.noted("endpoints")) == {"http://127.0.0.1:1"}
    assert bench.heard.states("a")[-1] == "Succeeded"
    assert "Training" in bench.heard.states("a")


async def test_a_task_whose_memory_cannot_be_worked_out_holds_up_nobody(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor the run itself, which says why it trains no further."""
    original = model_requests.demand_of

    def demand_of(lora: Any, *rest: Any) -> Any:
        if lora.rank == 13:
            raise OverflowError("int too large to convert to float")
        return original(lora, *rest)

    monkeypatch.setattr(model_requests, "demand_of", demand_of)
    monkeypatch.setattr(ending, "UNDECIDED_WITHIN", 1.0)
    odd = TASK.format(name="odd", priority=5, steps=4).replace("dataset:", "lora: {rank: 13}\n  dataset:")
    ends = await bench.run(world("a", "b", text=SECRET + odd))
    assert {name: ends[name].result for name in "ab"} == dict.fromkeys("ab", Result.SUCCEEDED)
    assert (ends["odd"].result, ends["odd"].cause.reason) == (Result.ABANDONED, "ReconcileError")
    assert "OverflowError: int too large" in ends["odd"].cause.message


async def test_a_timeline_is_written_at_the_end(bench: Bench, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    await bench.run(world("a"), timeline=file)
    events = json.loads(file.read_text())["traceEvents"]
    assert [event["args"]["tasks"] for event in events if event["ph"] == "X"] == [["default/a"]]
    assert "default/a" in file.with_suffix(".svg").read_text()


async def test_statuses_are_files_without_keys_and_logs_lie_beside_them(bench: Bench) -> None:
    await bench.run(world("a"))
    state = bench.home / "state"
    task = yaml.safe_load((state / "loratasks" / "default.a.yaml").read_text())
    assert task["status"]["progress"] == "4/4"
    assert task["status"]["adapter"]["uri"] == "s3://adapters/a"
    assert list((state / "lorapipelines").glob("default.*.yaml"))
    assert list((state / "logs").glob("*/rank-0.log"))
    everything = "".join(file.read_text() for file in state.rglob("*") if file.is_file())
    assert "the-secret" not in everything
    assert "the-key" not in everything


async def test_a_task_that_fails_does_not_hold_the_others_up(bench: Bench) -> None:
    bench.script(fail={"a": "InvalidRow"})
    ends = await bench.run(world("a", "b"))
    assert ends["b"].result is Result.SUCCEEDED
    assert (ends["a"].result, ends["a"].cause.reason) == (Result.FAILED, "InvalidRow")
    assert "line 7" in ends["a"].cause.message


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_rank_that_dies_restarts_the_group_and_the_tasks_succeed(bench: Bench, rank: int) -> None:
    bench.script(die={"rank": rank, "after_step": 2, "code": 1, "times": 1}, step_seconds=0.3)
    ends = await bench.run(world("a", stages=2))
    assert ends["a"].result is Result.SUCCEEDED
    assert bench.noted("deaths") == [str(rank)]
    assert len(bench.noted("pids")) == 4
    assert bench.alive() == []


async def test_a_group_that_dies_again_and_again_is_given_up_with_its_last_words(bench: Bench) -> None:
    bench.script(die={"rank": 0, "after_step": 1, "code": 1, "times": 99})
    ends = await bench.run(world("a", stages=2, restarts=1))
    assert (ends["a"].result, ends["a"].cause.reason) == (Result.ABANDONED, "WorkersEnded")
    assert "rank 0 ended with exit code 1: out of luck" in ends["a"].cause.message
    assert len(bench.noted("deaths")) == 2
    assert bench.alive() == []


async def test_a_group_that_stands_still_is_started_anew_and_says_so(bench: Bench) -> None:
    bench.script(stall={"after_step": 2, "times": 1})
    pipeline = """\
apiVersion: mlora.dev/v1alpha1
kind: LoRAPipeline
metadata: {name: p}
spec: {model: {name: m, uri: "file:///models/m"}, stages: 2, stallTimeout: 2s}
"""
    ends = await bench.run(world("a", text=SECRET + pipeline))
    assert ends["a"].result is Result.SUCCEEDED
    assert len(bench.noted("pids")) == 4
    assert [event.reason for event in bench.heard.events].count("NoProgress") == 1
    assert bench.alive() == []


async def test_a_wrong_configuration_is_not_tried_again(bench: Bench) -> None:
    bench.script(die={"rank": 0, "after_step": 1, "code": 2, "times": 99})
    ends = await bench.run(world("a"))
    assert ends["a"].result is Result.ABANDONED
    assert "exit code 2: out of luck" in ends["a"].cause.message
    assert len(bench.noted("deaths")) == 1


async def test_what_nobody_will_bring_ends_the_run(bench: Bench) -> None:
    ends = await bench.run(world("a", text=""))
    assert (ends["a"].result, ends["a"].cause.reason) == (Result.REJECTED, "SecretNotFound")
    assert "keys" in ends["a"].cause.message


async def test_a_suspended_task_is_left_alone(bench: Bench) -> None:
    suspended = TASK.format(name="z", priority=0, steps=1).replace(
        "  priority", "  suspend: true\n  priority"
    )
    ends = await bench.run(world("a", text=SECRET + suspended))
    assert (ends["a"].result, ends["z"].result) == (Result.SUCCEEDED, Result.SUSPENDED)
    assert bench.noted("trained") == ["default/a"]


async def test_a_second_run_trains_only_what_had_not_succeeded(bench: Bench) -> None:
    bench.script(fail={"a": "InvalidRow"})
    await bench.run(world("a", "b"))
    bench.script()
    ends = await bench.run(world("a", "b"))
    assert {end.result for end in ends.values()} == {Result.SUCCEEDED}
    assert sorted(bench.noted("trained")) == ["default/a", "default/b"]


async def test_a_changed_task_is_trained_again(bench: Bench) -> None:
    await bench.run(world("a", steps=2))
    await bench.run(world("a", steps=3))
    assert bench.noted("trained") == ["default/a", "default/a"]


async def test_cancelling_ends_all_processes(bench: Bench) -> None:
    bench.script(step_seconds=5)
    running = asyncio.create_task(bench.run(world("a", stages=2)))
    await until(lambda: bool(bench.noted("trained")) and len(bench.noted("pids")) == 2)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(bench.noted("pids")) == 2
    assert bench.alive() == []


async def test_a_killed_run_leaves_no_process_behind(bench: Bench) -> None:
    bench.script(step_seconds=60)
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        RUN_ALONE,
        str(bench.home),
        str(WORKER),
        env={**os.environ, "FAKE_HOME": str(bench.home)},
    )
    await until(lambda: bool(bench.noted("pids")))
    child.kill()
    await child.wait()
    await until(lambda: not bench.alive())
    assert bench.alive() == []


RUN_ALONE = """
import asyncio, os, sys
from pathlib import Path
from mlora_operator.local.adapt import RunOptions, adapt
from mlora_operator.local.machine import Machine
from mlora_operator.local.manifests import read_manifests
from mlora_operator.local.run_environment import RunEnvironment
from mlora_operator.local.run import run

class Nobody:
    def task_changed(self, task): pass
    def happened(self, event): pass

home, worker = Path(sys.argv[1]), sys.argv[2]
text = '''
apiVersion: mlora.dev/v1alpha1
kind: LoRATask
metadata: {name: a}
spec: {baseModel: m, dataset: {uri: "s3://d/a"}, output: {uri: "s3://o/a"}}
'''
machine = Machine(cpus=2, memory_bytes=8 << 30)
world = adapt(read_manifests([("f", text)]), RunOptions(models={"m": "file:///m"}, device="cpu"), machine)
place = RunEnvironment(home / "state", home / "cache", machine, dict(os.environ), (sys.executable, worker))
asyncio.run(run(world, place, Nobody()))
"""


async def test_each_rank_gets_its_own_gpu(bench: Bench) -> None:
    machine = Machine(cpus=2, memory_bytes=8 << 30, gpus=("4", "7"))
    manifests = read_manifests([("f.yaml", TASK.format(name="a", priority=0, steps=1) + SECRET)])
    wishes = RunOptions(models={"m": "file:///models/m"}, stages=2)
    await bench.run(adapt(manifests, wishes, machine), gpus=("4", "7"))
    noted = [json.loads(line) for line in (bench.home / "environment").read_text().splitlines()]
    assert {one["rank"]: one["gpu"] for one in noted} == {0: "4", 1: "7"}
