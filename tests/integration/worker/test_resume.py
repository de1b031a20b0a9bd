"""Real ranks that are killed, or asked to end: tasks go on where they were, and end with the same bits."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mlora_worker.protocol import TaskPhase, TaskPlan, TaskReport
from tests.integration.worker.conftest import Group

pytestmark = pytest.mark.integration

MakeTask = Callable[..., TaskPlan]
StartGroup = Callable[..., Group]

STEPS = 120
TRAINING = {
    "maxSteps": STEPS, "batchSize": 4, "gradientAccumulationSteps": 2, "warmupSteps": 4, "weightDecay": 0.1,
    "checkpointEverySteps": 5,
}  # fmt: skip


def weights_of(task: TaskPlan) -> dict[str, torch.Tensor]:
    return load_file(Path(task.output_uri.removeprefix("file://")) / "adapter_model.safetensors")


def test_after_a_kill_and_after_sigterm_a_task_goes_on_and_ends_with_the_same_bits(
    start_group: StartGroup, make_task: MakeTask, tiny_model: Path, tmp_path: Path
) -> None:
    group = start_group(tiny_model, stages=2, termination_seconds=30)
    lora = {"rank": 4, "alpha": 8, "dropout": 0.1, "targetModules": ["q_proj", "v_proj", "down_proj"]}
    undisturbed = make_task("one", lora=lora, training=TRAINING, outputUri=f"file://{tmp_path}/undisturbed")
    assert group.finish(undisturbed)["one"].phase is TaskPhase.SUCCEEDED

    task = make_task("two", lora=lora, training=TRAINING)
    same_rows = task.model_copy(update={"dataset": undisturbed.dataset, "started": True})
    group.plan(same_rows)
    before = report_of(group, same_rows, lambda task: (task.checkpoint_step or 0) >= 5)
    group.ranks[1].send_signal(signal.SIGKILL)
    assert group.ranks[0].wait(60) == 75, group.logs()

    group.start()
    group.plan(same_rows)
    resumed = report_of(group, same_rows, lambda task: task.resumed_step is not None and task.step < STEPS)
    assert resumed.resumed_step is not None
    assert resumed.resumed_step >= (before.checkpoint_step or 0)
    assert resumed.resumed_step % 5 == 0

    for rank in group.ranks:
        rank.send_signal(signal.SIGTERM)
    assert [rank.wait(60) for rank in group.ranks] == [0, 0], group.logs()
    log = (group.folder / "rank-0.log").read_text()
    assert "asked to stop by SIGTERM" in log

    group.start()
    finished = group.finish(same_rows)["two"]
    assert (finished.phase, finished.step) == (TaskPhase.SUCCEEDED, STEPS), finished
    assert finished.resumed_step is not None
    assert finished.resumed_step >= resumed.step, "SIGTERM lost no step"
    one, two = weights_of(undisturbed), weights_of(same_rows)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not (Path(same_rows.output_uri.removeprefix("file://")) / "checkpoints").exists()


def report_of(group: Group, task: TaskPlan, done: Callable[[TaskReport], bool]) -> TaskReport:
    report = group.wait_for(lambda report: any(one.uid == task.uid and done(one) for one in report.tasks))
    return next(one for one in report.tasks if one.uid == task.uid)
