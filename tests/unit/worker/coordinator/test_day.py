"""A chat template that writes the date: a task that goes on has the rows that it began with, on whatever day."""

from __future__ import annotations

import threading
from dataclasses import replace
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from mlora_worker.coordinator.parts import CoordinatorParts
from mlora_worker.coordinator.preparation.prepare import BaseModel, prepare_task
from mlora_worker.coordinator.service import Coordinator
from mlora_worker.coordinator.task.prepared import PreparedTask
from mlora_worker.preparing.maker import RowsHere
from mlora_worker.protocol import (
    Dataset,
    DatasetFormat,
    FailureReason,
    LoRAConfig,
    ModelFacts,
    ModelSource,
    ModuleShape,
    Plan,
    StageReport,
    TaskPhase,
    TaskPlan,
    TaskReport,
    Training,
)
from mlora_worker.storage.artifacts.checkpoint import write_checkpoint
from mlora_worker.storage.artifacts.local_spool import LocalSpool
from mlora_worker.storage.artifacts.task_state import SavedProgress, TaskState
from tests.fixtures.inline import after, inline_pool
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.tiny_model import CHATML, byte_level_tokenizer

FIRST, LATER = date(2026, 2, 27), date(2026, 3, 4)
FACTS = ModelFacts(
    hidden_size=8, intermediate_size=8, layers=1, attention_heads=1, vocab_size=512, max_positions=2048, dtype_bytes=4,
    modules=(ModuleShape(stage=0, name="q_proj", path="layers.*.q_proj", in_features=8, out_features=8, count=1),),
)  # fmt: skip
TASK = TaskPlan(
    uid="a", namespace="n", name="a", base_model="m", lora=LoRAConfig(rank=2, target_modules=("q_proj",)),
    dataset=Dataset(inline='{"prompt": "a?", "completion": "b"}'), training=Training(), output_uri="s3://b/p",
)  # fmt: skip
FOLDER = "s3://b/p/checkpoints"


BASE = BaseModel(
    source=ModelSource(name="m", uri="s3://models/m"),
    architecture=cast(Any, SimpleNamespace(transposed=False, is_part=False)),
    facts=FACTS,
)


def rows(dated: bool, store: MemoryStore) -> RowsHere:
    tokenizer = byte_level_tokenizer(vocabulary=300)
    tokenizer.chat_template = ("{{ strftime_now('%d %b %Y') }}\n" if dated else "") + CHATML
    return RowsHere(tokenizer, FACTS.max_positions, 10**6, lambda _: store)


def prepared(task: TaskPlan, store: MemoryStore, day: date, *, dated: bool, base: BaseModel = BASE) -> object:
    return prepare_task(
        task,
        base,
        store,
        checkpoints=FOLDER,
        spool=LocalSpool(None),
        rows=rows(dated, store),
        day=lambda: day,
    )


def state(store: MemoryStore, day: date, dated: bool, task: TaskPlan = TASK) -> TaskState:
    """Of the first step, as a run of ``day`` has it."""
    made = prepared(task, store, day, dated=dated)
    assert isinstance(made, PreparedTask)
    progress = SavedProgress(
        step=1, total_steps=made.steps.total_steps, updates=1, epoch=0, epoch_step=1, learning_rate=0.1, last=None,
        tokens=1, seconds=1.0, task_uid="a", task="n/a", fingerprint=made.fingerprint,
    )  # fmt: skip
    return TaskState(progress, {"parameters.layers.0.q_proj.lora_A.weight": torch.ones(2, 8)})


def without_its_day(state: TaskState) -> TaskState:
    """As a worker wrote it before the day was a fact."""
    facts = {name: fact for name, fact in state.progress.fingerprint.items() if name != "dataset.date"}
    return replace(state, progress=state.progress.model_copy(update={"fingerprint": facts}))


def reported(
    store: MemoryStore, kept: LocalSpool, today: date, dated: bool, task: TaskPlan = TASK
) -> TaskReport:
    stage = StageReport(
        stage=0, first_layer=0, last_layer=0, device="cpu", resident_bytes=0, capacity_bytes=0
    )
    parts = CoordinatorParts(
        base=BASE, rows=rows(dated, store), stages=(stage,), run_id="run", microbatch_tokens=100,
        open_store=lambda _: store,
        announce=lambda *_: None, preparing=inline_pool(), resuming=inline_pool(), storing=inline_pool(),
        end=pytest.fail, spool=kept, later=after(lambda _: pytest.fail("no pause")), today=lambda: today,
    )  # fmt: skip
    one = Coordinator(parts, threading.Condition(threading.RLock()))
    one.set_plan(Plan(generation=1, tasks=(task,)))
    [report] = one.wait_report(-1, 0).tasks
    return report


@pytest.mark.parametrize(("is_part", "names"), [(False, ("q_proj",)), (True, ("layers.0.q_proj",))])
def test_modules_of_a_text_part_are_published_by_whole_paths(is_part: bool, names: tuple[str, ...]) -> None:
    """Its towers may have modules of the same names."""
    base = replace(BASE, architecture=cast(Any, SimpleNamespace(transposed=False, is_part=is_part)))
    made = prepared(TASK, MemoryStore(), FIRST, dated=False, base=base)
    assert isinstance(made, PreparedTask)
    assert made.targets == names


@pytest.mark.parametrize("dated", [True, False], ids=["with the date", "without"])
@pytest.mark.parametrize("place", ["the store", "rank 0's volume"])
def test_a_task_goes_on_from_a_checkpoint_of_another_day(tmp_path: Path, place: str, dated: bool) -> None:
    store, kept = MemoryStore(), LocalSpool(tmp_path)
    if place == "the store":
        write_checkpoint(store, FOLDER, state(store, FIRST, dated))
    else:
        kept.keep_state("a", state(store, FIRST, dated))
    report = reported(store, kept, LATER, dated)
    assert (report.phase, report.failure) == (TaskPhase.PREPARED, None)
    assert report.checkpoint_step == 1


@pytest.mark.parametrize("place", ["the store", "rank 0's volume"])
def test_a_checkpoint_that_does_not_tell_its_day_is_gone_on_from_if_the_rows_are_the_same(
    tmp_path: Path, place: str
) -> None:
    store, kept = MemoryStore(), LocalSpool(tmp_path)
    former = without_its_day(state(store, FIRST, True))
    if place == "the store":
        write_checkpoint(store, FOLDER, former)
    else:
        kept.keep_state("a", former)
    report = reported(store, kept, LATER, True)
    assert report.failure is not None
    assert report.failure.reason is FailureReason.CHECKPOINT_MISMATCH
    assert "dataset.sha256" in report.failure.message
    report = reported(store, kept, FIRST, True)
    assert (report.phase, report.failure) == (TaskPhase.PREPARED, None)
    assert report.checkpoint_step == 1


def test_rows_that_go_through_no_template_have_no_day() -> None:
    rows = Dataset(inline='{"text": "b"}', format=DatasetFormat.TEXT)
    task, store = TASK.model_copy(update={"dataset": rows}), MemoryStore()
    first, later = (state(store, day, True, task).progress.fingerprint for day in (FIRST, LATER))
    assert first == later
    assert "dataset.date" not in first


def test_a_task_that_begins_anew_has_todays_date() -> None:
    store = MemoryStore()
    facts = state(store, LATER, True).progress.fingerprint
    assert facts["dataset.date"] == "2026-03-04"
    assert facts["dataset.sha256"] != state(store, FIRST, True).progress.fingerprint["dataset.sha256"]
    assert "dataset.date" not in state(store, LATER, False).progress.fingerprint
    assert reported(store, LocalSpool(None), LATER, True).phase is TaskPhase.PREPARED
