"""What an earlier run has kept on rank 0's volume: taken up by the task it is of, and gone when nobody needs it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from mlora_worker.coordinator.parts import CoordinatorParts
from mlora_worker.coordinator.preparation.prepare import BaseModel, prepare_task
from mlora_worker.coordinator.service import Coordinator
from mlora_worker.protocol import (
    DataCounts,
    Dataset,
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
from mlora_worker.storage.artifacts.adapter import (
    FinishedAdapter,
    adapter_config,
    find_published,
    fingerprint,
)
from mlora_worker.storage.artifacts.local_spool import LocalSpool
from mlora_worker.storage.errors import AccessRefused
from tests.fixtures.inline import after, inline_pool
from tests.fixtures.makers import NoRows
from tests.fixtures.memory_store import MemoryStore

FACTS = ModelFacts(
    hidden_size=8, intermediate_size=8, layers=1, attention_heads=1, vocab_size=9, max_positions=64, dtype_bytes=4,
    modules=(ModuleShape(stage=0, name="q_proj", path="layers.*.q_proj", in_features=8, out_features=8, count=1),),
)  # fmt: skip
LORA = LoRAConfig(rank=2, target_modules=("q_proj",))
TASK = TaskPlan(
    uid="a", namespace="n", name="a", base_model="m", lora=LORA, dataset=Dataset(inline="{}"), training=Training(),
    output_uri="s3://b/p", started=True,
)  # fmt: skip
TENSORS = {"q_proj.lora_A.weight": torch.ones(2, 8), "q_proj.lora_B.weight": torch.ones(8, 2)}


def base(revision: str | None = "v1") -> BaseModel:
    source = ModelSource(name="m", uri="s3://models/m", revision=revision)
    architecture = SimpleNamespace(transposed=False, is_part=False)
    return cast(BaseModel, SimpleNamespace(facts=FACTS, source=source, architecture=architecture))


def finished(revision: str | None = "v1") -> FinishedAdapter:
    config = adapter_config(LORA, "m", revision, ["q_proj"])
    return FinishedAdapter(TENSORS, config, 7, 0.5, DataCounts(rows=4, used=3))


def keep(root: Path, task: TaskPlan, adapter: FinishedAdapter) -> LocalSpool:
    with LocalSpool(root).weights(task.uid, fingerprint(task), adapter):
        return LocalSpool(root)


def never(_: float) -> None:
    pytest.fail("there is nothing to wait for")


def coordinator(store: MemoryStore, kept: LocalSpool, pause: Callable[[float], None] = never) -> Coordinator:
    stage = StageReport(
        stage=0, first_layer=0, last_layer=0, device="cpu", resident_bytes=0, capacity_bytes=0
    )
    parts = CoordinatorParts(
        base=base(), rows=NoRows(), stages=(stage,), run_id="run", microbatch_tokens=100, open_store=lambda _: store,
        announce=lambda *_: pytest.fail("nothing is to be trained"), preparing=inline_pool(),
        resuming=inline_pool(), storing=inline_pool(), end=pytest.fail, spool=kept, later=after(pause),
    )  # fmt: skip
    return Coordinator(parts, threading.Condition(threading.RLock()))


def reported(one: Coordinator) -> TaskReport:
    [report] = one.wait_report(-1, 0).tasks
    return report


def test_an_adapter_that_an_earlier_run_has_finished_is_uploaded_and_nothing_is_trained(
    tmp_path: Path,
) -> None:
    store = MemoryStore()
    one = coordinator(store, keep(tmp_path, TASK, finished()))
    assert one.set_plan(Plan(generation=1, tasks=(TASK.model_copy(update={"admitted": True}),)))
    assert one.supply() is None
    report = reported(one)
    assert (report.phase, report.step, report.total_steps, report.resumed_step) == (
        TaskPhase.SUCCEEDED,
        7,
        7,
        7,
    )
    assert report.data == finished().data
    manifest = find_published(cast(Any, store), TASK.output_uri)
    assert manifest is not None
    assert (manifest.step, manifest.loss, manifest.fingerprint) == (7, 0.5, fingerprint(TASK))
    assert list(tmp_path.iterdir()) == []


def test_while_its_store_refuses_it_again_the_report_says_why_and_the_adapter_stays(tmp_path: Path) -> None:
    store, said = MemoryStore(), list[TaskReport]()

    def pause(_: float) -> None:
        said.append(reported(one))
        store.on_call = None if len(said) == 2 else store.on_call

    def refuse(action: str, _: str) -> None:
        if action == "write":
            assert list(tmp_path.rglob("record.json"))
            raise AccessRefused("unknown key")

    store.on_call = refuse
    one = coordinator(store, keep(tmp_path, TASK, finished()), pause)
    one.set_plan(Plan(generation=1, tasks=(TASK,)))
    assert [(report.phase, report.step) for report in said] == [(TaskPhase.SAVING, 7)] * 2
    assert {report.blocked.reason for report in said if report.blocked} == {FailureReason.ACCESS_DENIED}
    assert (reported(one).phase, reported(one).blocked) == (TaskPhase.SUCCEEDED, None)


@pytest.mark.parametrize(
    ("changed", "revision"),
    [({"uid": "another"}, "v1"), ({"training": Training(seed=1)}, "v1"), ({}, "v2"), ({}, None)],
    ids=["another uid", "another seed", "another revision of the base model", "no revision"],
)
def test_a_finished_adapter_of_another_task_spec_or_base_model_is_left_alone(
    tmp_path: Path, changed: dict[str, object], revision: str | None
) -> None:
    kept, task = keep(tmp_path, TASK, finished(revision)), TASK.model_copy(update=changed)

    def refuse(action: str, _: str) -> None:
        if action == "write":
            raise AccessRefused("the output is looked at, as for any other task")

    with pytest.raises(AccessRefused, match="as for any other"):
        prepare_task(task, base(), MemoryStore(refuse), checkpoints="s3://b/c", spool=kept, rows=NoRows())


def test_what_is_kept_goes_with_its_task_and_what_is_of_others_stays(tmp_path: Path) -> None:
    kept = keep(tmp_path, TASK, finished("old"))
    keep(tmp_path, TASK.model_copy(update={"uid": "b"}), finished())

    def refuse(*_: str) -> None:
        raise AccessRefused("no")

    one = coordinator(MemoryStore(refuse), kept)
    one.set_plan(Plan(generation=1, tasks=(TASK.model_copy(update={"started": False}),)))
    assert reported(one).phase is TaskPhase.FAILED
    assert {path.name for path in tmp_path.iterdir()} == {"task-a", "task-b"}
    one.set_plan(Plan(generation=2))
    assert {path.name for path in tmp_path.iterdir()} == {"task-b"}
