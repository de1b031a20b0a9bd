"""The commands that show and change tasks, in a cluster whose operator acts on what they write."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlora_worker.protocol import TaskPhase
from tests.fixtures.spoken import Spoken, mlora

pytestmark = pytest.mark.integration


@pytest.fixture
def here(bench: Any) -> tuple[str, ...]:
    return "-n", bench.namespace, "--kubeconfig", str(bench.kubectl.kubeconfig)


def done(*arguments: str) -> Spoken:
    said = mlora(*arguments)
    assert said.code == 0, said.err
    return said


def test_tasks_are_listed_suspended_resumed_and_deleted(bench: Any, here: tuple[str, ...]) -> None:
    bench.coordinator.hold = TaskPhase.TRAINING
    bench.apply("t1")
    bench.apply("t2")
    bench.until(lambda: bench.status("loratask", "t1").get("state") == "Training", "t1 trains")
    names, *rows = done("list", *here).out.splitlines()
    assert names.split()[:2] == ["NAME", "STATE"]
    assert rows[0].split()[:2] == ["t1", "Training"]
    assert done("list", "--pipelines", "-o", "name", *here).out.startswith("lorapipeline.mlora.dev/")
    assert "Running" in done("get", "t1", *here).out

    done("suspend", "t1", "t2", *here)
    bench.until(lambda: bench.status("loratask", "t1").get("state") == "Suspended", "t1 is suspended")
    listed = json.loads(done("list", "-o", "json", *here).out)["items"]
    assert [one["spec"]["suspend"] for one in listed] == [True, True]
    done("resume", "t1", *here)
    bench.until(lambda: bench.status("loratask", "t1").get("state") == "Training", "t1 trains again")
    done("delete", "t1", "t2", "--yes", *here)
    bench.until(lambda: bench.kubectl.json("get", "loratasks")["items"] == [], "both are gone")


def test_a_failed_task_is_retried(bench: Any, here: tuple[str, ...]) -> None:
    bench.apply(baseModel="Org/Unserved", startDeadlineSeconds=2)
    bench.kubectl("wait", "--for=condition=Failed", "--timeout=30s", "loratask/t1")
    assert "DeadlineExceeded" in done("get", "t1", *here).out
    done("retry", "t1", *here)
    bench.until(lambda: bench.status("loratask", "t1").get("retries") == 1, "it was retried")
    assert "retried" in done("get", "t1", *here).out
