"""The coordinator's plans and pools, with stores that fail: what is retried, what is final, what a plan changes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlora_worker.coordinator.parts import CoordinatorParts
from mlora_worker.coordinator.preparation.prepare import BaseModel
from mlora_worker.coordinator.service import Coordinator
from mlora_worker.coordinator.task.checkpoint_state import CheckpointState
from mlora_worker.coordinator.task.known_plan import with_what_is_known
from mlora_worker.coordinator.uploads.retrier import CallLater, WorkPool
from mlora_worker.data.errors import DataError, Interrupted
from mlora_worker.data.training_rows.reference_files import ReferenceFiles
from mlora_worker.protocol import (
    Dataset,
    FailureReason,
    LoRAConfig,
    Plan,
    StageReport,
    StorageAccess,
    TaskPhase,
    TaskPlan,
    Training,
)
from mlora_worker.storage.artifacts.task_state import SavedProgress, TaskState
from mlora_worker.storage.errors import AccessRefused, StorageError, StoreUnreachable
from tests.fixtures.inline import Waiting, after, inline_pool, pool
from tests.fixtures.makers import NoRows


@dataclass
class Failing:
    """Opens no store; counts how often it was asked, and with which keys."""

    error: Exception
    asked: list[StorageAccess] = field(default_factory=list)

    def __call__(self, access: StorageAccess) -> Any:
        self.asked.append(access)
        raise self.error


def coordinator(
    open_store: Failing,
    pauses: list[float],
    later: CallLater | None = None,
    preparing: WorkPool | None = None,
    resuming: WorkPool | None = None,
    references: ReferenceFiles | None = None,  # None: nowhere
    changed: threading.Condition | None = None,
) -> Coordinator:
    stage = StageReport(
        stage=0, first_layer=0, last_layer=1, device="cpu", resident_bytes=0, capacity_bytes=0
    )
    parts = CoordinatorParts(
        base=cast(BaseModel, SimpleNamespace(facts=None)),
        stages=(stage,),
        run_id="run",
        microbatch_tokens=100,
        open_store=open_store,
        rows=NoRows(),
        announce=lambda *_: None,
        preparing=preparing or inline_pool(),
        resuming=resuming or inline_pool(),
        storing=inline_pool(),
        end=pytest.fail,
        clock=lambda: 0.0,
        later=later or after(pauses.append),
        references=references or ReferenceFiles(),
    )
    return Coordinator(parts, changed or threading.Condition(threading.RLock()))


def task(uid: str = "a") -> TaskPlan:
    return TaskPlan(
        uid=uid, namespace="n", name=uid, base_model="m", lora=LoRAConfig(), dataset=Dataset(inline="{}"),
        training=Training(), output_uri="s3://b/p",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("error", "tries", "reason"),
    [
        (StoreUnreachable("away"), 6, FailureReason.STORAGE_UNREACHABLE),
        (AccessRefused("no"), 1, FailureReason.ACCESS_DENIED),
        (StorageError(FailureReason.DATASET_NOT_FOUND, "none"), 1, FailureReason.DATASET_NOT_FOUND),
        (Interrupted(FailureReason.INVALID_ROW, "it is killed by each try"), 6, FailureReason.INVALID_ROW),
        (DataError(FailureReason.INVALID_ROW, "line 3"), 1, FailureReason.INVALID_ROW),
    ],
)
def test_a_store_that_is_away_and_a_killed_process_are_tried_again_but_a_wrong_address_is_final(
    error: Exception, tries: int, reason: FailureReason
) -> None:
    store, pauses = Failing(error), list[float]()
    one = coordinator(store, pauses)
    assert one.set_plan(Plan(generation=1, tasks=(task(),)))
    [report] = one.wait_report(-1, 0).tasks
    assert report.phase is TaskPhase.FAILED
    assert report.failure is not None
    assert (report.failure.reason, report.failure.message) == (reason, str(error))
    assert len(store.asked) == tries
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0][: tries - 1]


def test_started_tasks_whose_store_refuses_them_hold_nobody_up() -> None:
    put_off: list[Callable[[], None]] = []
    store = Failing(AccessRefused("no"))
    one = coordinator(store, [], later=lambda _, call: put_off.append(call))
    started = [task(uid).model_copy(update={"started": True}) for uid in ("a", "b", "c")]
    assert one.set_plan(Plan(generation=1, tasks=(*started, task("new"))))
    *refused, new = one.wait_report(-1, 0).tasks
    for report in refused:
        assert report.phase is TaskPhase.PREPARING
        assert report.blocked is not None
        assert report.blocked.reason is FailureReason.ACCESS_DENIED
    assert new.phase is TaskPhase.FAILED, "its turn came, and it was told at once"
    assert len(store.asked) == 4
    for call in put_off[:]:
        call()
    assert len(store.asked) == 7


def test_tasks_that_have_trained_do_not_wait_for_new_rows_of_others() -> None:
    new, old = Waiting(), Waiting()
    one = coordinator(Failing(AccessRefused("no")), [], preparing=pool(new), resuming=pool(old))
    known = task("b").model_copy(update={"started": True})
    assert one.set_plan(Plan(generation=1, tasks=(task("a"), known)))
    assert (len(new.waiting), len(old.waiting)) == (1, 1)


def test_what_an_operator_cannot_read_any_more_stays_as_it_was() -> None:
    keys = StorageAccess.model_validate({"accessKey": "a", "secretKey": "b"})
    rows = Dataset.model_validate({"configMapRef": {"name": "rows", "key": "k"}})
    known = task().model_copy(
        update={"storage": keys, "dataset": rows, "dataset_text": "{}", "template_text": "t"}
    )
    lost = {"dataset_text": None, "template_text": None}
    bare = known.model_copy(update={"storage": StorageAccess(), "priority": 7, **lost})
    assert with_what_is_known(bare, known) == known.model_copy(update={"priority": 7})
    other = known.model_copy(
        update={
            "storage": StorageAccess.model_validate({"accessKey": "c", "secretKey": "d"}),
            "dataset_text": "[]",
            "template_text": "u",
        }
    )
    assert with_what_is_known(other, known) == other


def test_plans_are_idempotent_older_ones_are_refused_and_what_is_not_listed_is_forgotten() -> None:
    store = Failing(AccessRefused("no"))
    one = coordinator(store, [])
    assert one.set_plan(Plan(generation=2, tasks=(task("a"), task("b"))))
    assert one.set_plan(Plan(generation=2, tasks=(task("a"), task("b"))))
    assert len(store.asked) == 2, "a task that is known is not prepared again"
    assert not one.set_plan(Plan(generation=1))
    assert not one.set_plan(Plan(generation=2, tasks=(task("a"),)))  # another operator's, of the same number
    assert one.wait_report(-1, 0).plan_generation == 2
    assert one.set_plan(Plan(generation=3, tasks=(task("b"),)))
    assert [report.uid for report in one.wait_report(-1, 0).tasks] == ["b"]


def test_what_a_task_has_done_is_brought_to_the_store_though_a_plan_left_it_out_for_a_moment() -> None:
    """It is in the stream until its step is back. Its state stayed in memory alone, and it was never Preempted."""
    store = Failing(AccessRefused("no"))
    one = coordinator(store, [], later=lambda *_: None, preparing=pool(Waiting()))
    assert one.set_plan(Plan(generation=1, tasks=(task(),)))
    here = one._tasks["a"]
    here.phase, here.in_stream = TaskPhase.TRAINING, True
    progress = SavedProgress(
        step=3, total_steps=9, updates=3, epoch=0, epoch_step=3, learning_rate=0.1, last=None, tokens=1, seconds=1.0,
        task_uid="a", task="n/a", fingerprint={},
    )  # fmt: skip
    here.checkpoint = CheckpointState(state=TaskState(progress, {}))
    assert one.set_plan(Plan(generation=2))
    assert (here.withdrawn, here.writing, store.asked) == (True, False, [])
    assert one.set_plan(Plan(generation=3, tasks=(task(),)))
    assert (here.withdrawn, here.writing, len(store.asked)) == (False, True, 1)


def test_a_report_waits_for_news() -> None:
    one = coordinator(Failing(AccessRefused("no")), [])
    before = one.wait_report(-1, 0).sequence
    threading.Timer(0.05, lambda: one.set_plan(Plan(generation=1))).start()
    assert one.wait_report(before, 5).sequence > before


def test_a_task_that_isnot_understood_fails_alone_and_one_that_is_here_goes_on() -> None:
    one = coordinator(Failing(AccessRefused("no")), [], preparing=pool(Waiting()))
    assert one.set_plan(Plan(generation=1, tasks=(task("a"), task("b"))))
    beyond = {"a": "training.sparsity: unknown field", "c": "lora.kind: unknown field"}
    assert one.set_plan(Plan(generation=2, tasks=(task("b"),)), beyond)
    assert not one.set_plan(Plan(generation=2, tasks=(task("b"),))), "another operator's, of the same number"
    assert one.set_plan(Plan(generation=2, tasks=(task("b"),)), dict(beyond))
    report = one.wait_report(-1, 0)
    assert report.plan_generation == 2
    phases = {found.uid: found.phase for found in report.tasks}
    assert phases == {"a": TaskPhase.PREPARING, "b": TaskPhase.PREPARING, "c": TaskPhase.FAILED}
    failure = report.tasks[-1].failure
    assert failure is not None
    assert failure.reason is FailureReason.INVALID_SPEC
    assert "lora.kind: unknown field" in failure.message
    assert one.set_plan(Plan(generation=3, tasks=(task("b"),)))
    assert [found.uid for found in one.wait_report(-1, 0).tasks] == ["b"]
    assert one.set_plan(Plan(generation=4, tasks=(task("b"), task("c")))), "its field is gone"
    assert [found.phase for found in one.wait_report(-1, 0).tasks] == [TaskPhase.PREPARING] * 2
