"""Keys that are revoked in mid-run: the finished adapter waits for new ones, outlives a kill, and is not trained again."""

from __future__ import annotations

import hashlib
import signal
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import SecretStr

from mlora_worker.protocol import FailureReason, StorageAccess, TaskPhase, TaskPlan, TaskReport
from tests.fixtures.storage import Keyring, Storage
from tests.integration.worker.conftest import Group

pytestmark = pytest.mark.integration

MakeTask = Callable[..., TaskPlan]
StartGroup = Callable[..., Group]

STEPS = 30


def test_after_a_revoked_key_and_a_killed_rank_new_keys_alone_complete_the_task(
    start_group: StartGroup,
    make_task: MakeTask,
    tiny_model: Path,
    local_s3: Storage,
    keyring: Keyring,
) -> None:
    group = start_group(tiny_model, stages=1)
    name = f"bot-{uuid.uuid4().hex}"

    def with_keys(pair: tuple[str, str], ending: str = "") -> TaskPlan:
        access = StorageAccess(
            endpoint=local_s3.endpoint,
            region=local_s3.region,
            access_key=SecretStr(pair[0] + ending),
            secret_key=SecretStr(pair[1] + ending),
        )
        plan = make_task(
            name, training={"maxSteps": STEPS, "checkpointEverySteps": 5}, outputUri=f"s3://adapters/{name}"
        )
        return plan.model_copy(update={"storage": access, "started": started})

    started = False
    first = keyring.add()
    group.plan(with_keys(first).model_copy(update={"admitted": False}))
    report_of(group, name, lambda task: task.phase is TaskPhase.PREPARED)  # rows and output were looked at
    keyring.revoke(first)
    group.plan(with_keys(first))
    training = report_of(group, name, lambda task: task.blocked is not None and task.step >= 5)
    assert training.blocked is not None
    assert training.blocked.reason is FailureReason.ACCESS_DENIED
    blocked = report_of(
        group,
        name,
        lambda task: task.phase is TaskPhase.SAVING and task.blocked is not None and adapter(group),
    )
    assert (blocked.step, blocked.checkpoint_step) == (STEPS, None), "it trained on to its end"
    [weights] = adapter(group)
    trained = hashlib.sha256(weights.read_bytes()).hexdigest()

    group.ranks[0].send_signal(signal.SIGKILL)
    group.ranks[0].wait(60)
    group.start()
    started = True
    group.plan(with_keys(first))
    still = report_of(group, name, lambda task: task.blocked is not None)
    assert still.blocked is not None
    assert still.blocked.reason is FailureReason.ACCESS_DENIED

    second = keyring.add()
    finished = group.finish(with_keys(second, ending="\n"))[name]
    assert finished.phase is TaskPhase.SUCCEEDED, finished.failure
    assert (finished.step, finished.total_steps, finished.resumed_step) == (STEPS, STEPS, STEPS)
    assert group.report().wire.microbatches == 0, "nothing was trained again"
    assert finished.adapter is not None
    assert finished.adapter.sha256 == trained
    assert finished.data is not None
    content = local_s3.client.get_object(Bucket="adapters", Key=f"{name}/adapter_model.safetensors")[
        "Body"
    ].read()
    assert hashlib.sha256(content).hexdigest() == trained
    group.until(
        lambda: not list((group.folder / "cache" / "kept").glob("task-*")), "what was kept is removed", 30
    )
    log = (group.folder / "rank-0.log").read_text()
    assert not [key for pair in (first, second) for key in pair if key in log]
    group.stop()


def adapter(group: Group) -> list[Path]:
    """The finished adapter that is kept on the rank's own volume."""
    records = (group.folder / "cache" / "kept").glob("task-*/adapter/record.json")
    return [record.with_name("adapter_model.safetensors") for record in records]


def report_of(group: Group, name: str, done: Callable[[TaskReport], object]) -> TaskReport:
    report = group.wait_for(
        lambda report: any(one.uid == f"uid-{name}" and done(one) for one in report.tasks), seconds=100
    )
    return next(one for one in report.tasks if one.uid == f"uid-{name}")
