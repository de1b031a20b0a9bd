"""An adapter of others lies where a task would write: told before it trains, and again before it is published."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from mlora_worker.coordinator.parts import CoordinatorParts
from mlora_worker.coordinator.preparation.prepare import prepare_task
from mlora_worker.coordinator.service import Coordinator
from mlora_worker.coordinator.uploads.publish import upload
from mlora_worker.protocol import (
    Failure,
    FailureReason,
    LoRAConfig,
    Plan,
    Report,
    StageReport,
    TaskPhase,
    TaskPlan,
    TaskReport,
)
from mlora_worker.storage.artifacts.adapter import find_published
from mlora_worker.storage.artifacts.existing_output import OutputExists
from mlora_worker.storage.artifacts.local_spool import LocalSpool
from tests.fixtures.inline import inline_pool
from tests.fixtures.makers import NoRows
from tests.fixtures.memory_store import MemoryStore

from .test_local_spool import TASK, base, finished, keep

NEW = TASK.model_copy(update={"started": False})
OTHER = TASK.model_copy(update={"uid": "other", "name": "other"})


def with_adapter_of(task: TaskPlan, store: MemoryStore | None = None) -> MemoryStore:
    store = store or MemoryStore()
    upload(task.model_copy(update={"output_overwrite": True}), finished(), cast(Any, store), LocalSpool(None))
    store.calls.clear()
    return store


def coordinator(store: MemoryStore, kept: LocalSpool, later: list[Callable[[], None]]) -> Coordinator:
    stage = StageReport(
        stage=0, first_layer=0, last_layer=0, device="cpu", resident_bytes=0, capacity_bytes=0
    )
    parts = CoordinatorParts(
        base=base(), rows=NoRows(), stages=(stage,), run_id="run", microbatch_tokens=100, open_store=lambda _: store,
        announce=lambda *_: pytest.fail("nothing is to be trained"), preparing=inline_pool(),
        resuming=inline_pool(), storing=inline_pool(), end=pytest.fail, spool=kept,
        later=lambda _, call: later.append(call),
    )  # fmt: skip
    return Coordinator(parts, threading.Condition(threading.RLock()))


def reported(one: Coordinator) -> Any:
    [report] = one.wait_report(-1, 0).tasks
    return report


@pytest.mark.parametrize(
    "change",
    [{}, {"lora": LoRAConfig(rank=1, target_modules=("q_proj",))}],
    ids=["the same spec", "another rank"],
)
def test_a_task_that_is_deleted_and_made_again_fails_before_anything_is_read_or_written(
    change: dict[str, Any],
) -> None:
    store = with_adapter_of(TASK)
    later: list[Callable[[], None]] = []
    one = coordinator(store, LocalSpool(None), later)
    assert one.set_plan(Plan(generation=1, tasks=(NEW.model_copy(update={"uid": "again", **change}),)))
    report = reported(one)
    assert (report.phase, report.failure.reason) == (TaskPhase.FAILED, FailureReason.OUTPUT_EXISTS)
    assert "an earlier task of the same name after 7 steps" in report.failure.message
    assert not [action for action, _ in store.calls if action in ("write", "delete")], (
        "not even the trial object"
    )
    assert not later, "it is final"
    manifest = find_published(cast(Any, store), TASK.output_uri)
    assert manifest is not None
    assert manifest.task_uid == TASK.uid


def test_one_that_says_so_goes_on_to_its_rows() -> None:
    store = with_adapter_of(OTHER)
    replacing = NEW.model_copy(update={"output_overwrite": True})
    with pytest.raises(pytest.fail.Exception, match="rows of a are made"):
        prepare_task(
            replacing, base(), cast(Any, store), checkpoints="s3://b/c", spool=LocalSpool(None), rows=NoRows()
        )


def test_its_own_published_adapter_ends_it_at_once() -> None:
    store = with_adapter_of(TASK)
    one = coordinator(store, LocalSpool(None), [])
    assert one.set_plan(Plan(generation=1, tasks=(TASK,)))
    assert reported(one).phase is TaskPhase.SUCCEEDED


def test_one_that_has_trained_waits_for_its_users_word_and_loses_nothing(tmp_path: Path) -> None:
    """Somebody's adapter came there while it trained."""
    store, later = with_adapter_of(OTHER), list[Callable[[], None]]()
    one = coordinator(store, keep(tmp_path, TASK, finished()), later)
    one.set_plan(Plan(generation=1, tasks=(TASK,)))
    for _ in range(3):
        report = reported(one)
        assert (report.phase, report.blocked.reason) == (TaskPhase.SAVING, FailureReason.OUTPUT_EXISTS)
        assert "the adapter of task other after 7 steps" in report.blocked.message
        later.pop()()
    assert not [action for action, _ in store.calls if action in ("write", "delete")]
    assert list(tmp_path.rglob("record.json")), "its adapter is kept"
    later.clear()
    one.set_plan(Plan(generation=2, tasks=(TASK.model_copy(update={"output_overwrite": True}),)))
    assert reported(one).phase is TaskPhase.SUCCEEDED, "at once, not after the pause between two tries"
    manifest = find_published(cast(Any, store), TASK.output_uri)
    assert manifest is not None
    assert manifest.task_uid == TASK.uid


def test_it_goes_on_by_itself_when_the_place_is_free_again(tmp_path: Path) -> None:
    store, later = with_adapter_of(OTHER), list[Callable[[], None]]()
    one = coordinator(store, keep(tmp_path, TASK, finished()), later)
    one.set_plan(Plan(generation=1, tasks=(TASK,)))
    assert reported(one).blocked is not None
    store.objects.clear()
    later.pop()()
    assert reported(one).phase is TaskPhase.SUCCEEDED


def test_an_adapter_that_came_meanwhile_is_not_replaced_by_the_upload() -> None:
    store = with_adapter_of(OTHER)
    with pytest.raises(OutputExists):
        upload(TASK, finished(), cast(Any, store), LocalSpool(None))


@pytest.mark.parametrize(
    ("format", "reason"), [(1, "UploadFailed"), (3, "UploadFailed"), (4, "OutputExists")]
)
def test_a_reader_of_a_former_format_is_told_a_reason_that_it_knows(format: int, reason: str) -> None:
    told = Failure(reason=FailureReason.OUTPUT_EXISTS, message="it has an adapter")
    tasks = (
        TaskReport(uid="a", phase=TaskPhase.FAILED, failure=told),
        TaskReport(uid="b", phase=TaskPhase.SAVING, blocked=told, released=True),
    )
    report = Report(run_id="r", sequence=1, plan_generation=1, ready=True, tasks=tasks)
    said = json.loads(report.as_understood_by(format).to_json())["tasks"]
    assert [one.get("failure", one.get("blocked")) for one in said] == [
        {"reason": reason, "message": "it has an adapter"}
    ] * 2
