"""A task that goes on from a checkpoint has the format that was detected when it began, whatever its file has become."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlora_worker.coordinator.preparation.prepare import prepare_task
from mlora_worker.coordinator.task.prepared import PreparedTask
from mlora_worker.protocol import (
    REPORT_FORMAT,
    Dataset,
    DatasetFormat,
    DatasetSpec,
    FailureReason,
    Report,
    TaskPhase,
    TaskPlan,
)
from mlora_worker.storage.artifacts.checkpoint import write_checkpoint
from mlora_worker.storage.artifacts.local_spool import LocalSpool
from tests.fixtures.memory_store import MemoryStore
from tests.unit.worker.coordinator.test_day import BASE, FOLDER, LATER, TASK, reported, rows, state

EITHER = {"messages": [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}], "text": "a"}
ROWS = json.dumps({"text": "a"} | EITHER)


def prepared(task: TaskPlan, kept: DatasetFormat | None = None) -> PreparedTask:
    store = MemoryStore()
    made = prepare_task(
        task, BASE, store, checkpoints=FOLDER, spool=LocalSpool(None), rows=rows(True, store), day=lambda: LATER,
        format=lambda: kept,
    )  # fmt: skip
    assert isinstance(made, PreparedTask)
    return made


def task(**settings: Any) -> TaskPlan:
    return TASK.model_copy(update={"dataset": DatasetSpec(**settings).for_plan()})


def test_what_was_detected_is_a_fact_of_the_checkpoint_and_counts_again() -> None:
    first = prepared(task(inline=ROWS))
    assert first.counts.format is DatasetFormat.MESSAGES
    assert first.fingerprint["dataset.format"] == "messages"
    again = prepared(task(inline=ROWS), DatasetFormat.TEXT)
    assert again.counts.format is DatasetFormat.TEXT
    assert again.fingerprint["dataset.format"] == "text"


def test_a_task_goes_on_in_its_format_when_its_file_would_tell_another() -> None:
    store = MemoryStore()
    write_checkpoint(store, FOLDER, state(store, LATER, True, task(inline=ROWS)))
    either = task(inline=json.dumps({"prompt": "a", "completion": "b"} | EITHER))
    report = reported(store, LocalSpool(None), LATER, True, either)
    assert (report.failure, report.phase, report.checkpoint_step) == (None, TaskPhase.PREPARED, 1)
    report = reported(MemoryStore(), LocalSpool(None), LATER, True, either)
    assert report.failure is not None
    assert report.failure.reason is FailureReason.INVALID_SPEC
    assert "may be promptCompletion or messages" in report.failure.message


def test_a_checkpoint_is_asked_once_for_all_that_the_rows_take_from_it() -> None:
    """And once more for its step, when they are made."""
    store = MemoryStore()
    write_checkpoint(store, FOLDER, state(store, LATER, True, task(inline=ROWS)))
    store.calls.clear()
    assert reported(store, LocalSpool(None), LATER, True, task(inline=ROWS)).checkpoint_step == 1
    read = [uri for action, uri in store.calls if action == "read" and uri.endswith("progress.json")]
    assert len(read) == 2


def test_a_format_that_the_task_names_is_no_fact_and_wins() -> None:
    made = prepared(task(inline=ROWS, format=DatasetFormat.MESSAGES), DatasetFormat.TEXT)
    assert made.counts.format is DatasetFormat.MESSAGES
    assert "dataset.format" not in made.fingerprint


def test_texts_that_are_detected_have_no_day() -> None:
    text = prepared(task(inline='{"text": "b"}'))
    assert text.counts.format is DatasetFormat.TEXT
    assert "dataset.date" not in text.fingerprint
    assert prepared(task(inline=ROWS)).fingerprint["dataset.date"] == LATER.isoformat()


@pytest.mark.parametrize(("known", "told"), [(REPORT_FORMAT, True), (8, True), (7, False), (1, False)])
def test_operators_that_do_not_know_the_field_are_not_told(known: int, told: bool) -> None:
    counts = {"rows": 1, "used": 1, "format": "messages"}
    report = Report.model_validate(
        {
            "runId": "r", "sequence": 1, "planGeneration": 1, "ready": True,
            "tasks": [{"uid": "a", "phase": "Prepared", "data": counts}],
        }
    )  # fmt: skip
    assert ("format" in json.loads(report.as_understood_by(known).to_json())["tasks"][0]["data"]) is told


def test_a_plan_of_a_task_without_a_format_says_so_to_workers() -> None:
    asked = task(inline=ROWS)
    assert json.loads(asked.dataset.model_dump_json(by_alias=True, exclude_defaults=True)) == {
        "inline": ROWS,
        "detectFormat": True,
    }
    assert Dataset(inline=ROWS).format is DatasetFormat.PROMPT_COMPLETION
