"""A rank that is stopped and not dead. Its peers cannot tell it from a slow one, so they wait; what rank 0 says is what the
operator tells it by. If it wakes in time, nothing was lost; once its group was given up, it can do nothing any more."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mlora_operator.api import conditions
from mlora_operator.api.pipeline import BaseModelSource, LoRAPipelineSpec
from mlora_operator.api.pipeline_status import PipelineStatus
from mlora_operator.coordinator.progress import heard
from mlora_operator.reconcile.admission.pipeline_view import PipelineView
from mlora_operator.reconcile.state.snapshot import Contact, Key, Pipeline, Pod, WorkerGroup
from mlora_operator.reconcile.workers.health import GroupHealth, health
from mlora_worker.protocol import Report, TaskPhase, TaskPlan
from tests.integration.worker.conftest import Group as Ranks

pytestmark = pytest.mark.integration

MakeTask = Callable[..., TaskPlan]
PATIENCE = 4  # seconds of ``stallTimeout``
START = datetime(2026, 1, 1, tzinfo=UTC)
PEER_LOST, KILLED = 75, -signal.SIGKILL
STEPS = {"maxSteps": 150, "checkpointEverySteps": 25}


def test_a_frozen_rank_is_seen_by_the_operator_and_costs_nothing_when_it_wakes(
    two_stages: Ranks, make_task: MakeTask, tmp_path: Path
) -> None:
    group = two_stages
    alone = undisturbed(group, make_task, tmp_path)
    task = make_task("thawed", training=STEPS)
    begin(group, task)
    group.ranks[1].send_signal(signal.SIGSTOP)
    try:
        found = listen(group, task)
        assert [one.stalled.reason if one.stalled else None for one in found] == [
            *[None] * PATIENCE,
            conditions.REASON_NO_PROGRESS,
        ]
        assert found[-1].restarts == 1
        assert group.ranks[0].poll() is None, "workers do not judge each other"
    finally:
        group.ranks[1].send_signal(signal.SIGCONT)

    finished = group.finish(task)["thawed"]
    assert (finished.phase, finished.step, finished.resumed_step) == (TaskPhase.SUCCEEDED, 150, None)
    assert same_bits(alone, task)


def test_a_frozen_rank_whose_group_was_started_anew_joins_nothing_and_writes_nothing_when_it_wakes(
    start_group: Callable[..., Ranks], tiny_model: Path, make_task: MakeTask
) -> None:
    """Rank 0 is frozen, the one that writes. Its peer is killed, as the operator has all pods of a stalled group deleted;
    the frozen process itself outlives that, as on a node that answers nobody."""
    former = start_group(tiny_model, stages=2, microbatch_tokens=16_384)
    task = make_task("given-up", training={**STEPS, "maxSteps": 20_000})
    begin(former, task, step=60)
    run = former.report().run_id
    former.ranks[0].send_signal(signal.SIGSTOP)
    try:
        former.ranks[1].kill()
        assert former.ranks[1].wait(30) == KILLED
        successor = start_group(tiny_model, stages=2, microbatch_tokens=16_384)
        successor.plan(task)
        trains = successor.wait_for(
            lambda report: any(
                one.uid == task.uid and one.step > (one.resumed_step or 0) for one in report.tasks
            )
        )
        assert trains.run_id != run
        [now] = trains.tasks
        assert now.resumed_step in (25, 50, 75), "a checkpoint of the former group"
        successor.plan(task.model_copy(update={"admitted": False}))
        successor.wait_for(lambda report: report.tasks[0].phase is TaskPhase.PREEMPTED)
        before, beside = files_of(task), successor.report()
        former.ranks[0].send_signal(signal.SIGCONT)
        assert former.ranks[0].wait(60) == PEER_LOST, former.logs()
    finally:
        former.ranks[0].send_signal(signal.SIGCONT)
    assert files_of(task) == before, "not a byte below the output was written or removed"
    after = successor.report()
    assert (after.run_id, after.wire.microbatches) == (beside.run_id, beside.wire.microbatches)
    assert all(rank.poll() is None for rank in successor.ranks)


def begin(group: Ranks, task: TaskPlan, step: int = 2) -> None:
    """Returns once it trains."""
    group.plan(task)
    group.wait_for(lambda report: any(one.uid == task.uid and one.step >= step for one in report.tasks))


def undisturbed(group: Ranks, make_task: MakeTask, folder: Path) -> TaskPlan:
    """The same task under another uid, trained with nobody beside it."""
    alone = make_task("thawed", training=STEPS, uid="uid-alone", outputUri=f"file://{folder}/alone")
    assert group.finish(alone)["thawed"].phase is TaskPhase.SUCCEEDED
    return alone


def listen(group: Ranks, task: TaskPlan) -> list[GroupHealth]:
    """What the operator finds second by second, by its own clock, from what rank 0 says."""
    settled, contact, found = stand_still(group), Contact(), []
    for second in range(PATIENCE + 1):
        now = START + timedelta(seconds=second)
        contact = heard(contact, group.report(), now)
        assert contact.report is not None
        assert contact.report.wire.microbatches == settled.wire.microbatches
        assert [one.phase for one in contact.report.tasks if one.uid == task.uid] == [TaskPhase.TRAINING]
        found.append(health(seen_with(contact), wanted=True, incomplete=False, now=now))
        time.sleep(1)
    return found


def seen_with(contact: Contact) -> PipelineView:
    """The pipeline of these ranks, as the operator sees it."""
    spec = LoRAPipelineSpec(
        model=BaseModelSource(name="org/tiny", uri="s3://models/tiny"), stages=2, stall_timeout=f"{PATIENCE}s"
    )
    pods = tuple(Pod(Key("test", f"group-{rank}"), f"pod-{rank}", "1", ready=True) for rank in range(2))
    status = PipelineStatus(observed_generation=1)
    pipeline = Pipeline(Key("test", "group"), "uid", START, 1, spec, status=status)
    return PipelineView(pipeline, (), WorkerGroup(2, "1", pods), contact)


def stand_still(group: Ranks) -> Report:
    """What was in the pipeline has come back."""
    before, after = group.report(), group.report(wait=1.0)
    while after.wire.microbatches > before.wire.microbatches:
        time.sleep(0.5)
        before, after = after, group.report()
    return after


def same_bits(one: TaskPlan, other: TaskPlan) -> bool:
    left, right = (load_file(folder_of(task) / "adapter_model.safetensors") for task in (one, other))
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def files_of(task: TaskPlan) -> dict[str, tuple[int, int]]:
    """All files below the output, with size and time of the last write."""
    paths = [path for path in folder_of(task).rglob("*") if path.is_file()]
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in paths}


def folder_of(task: TaskPlan) -> Path:
    return Path(task.output_uri.removeprefix("file://"))
