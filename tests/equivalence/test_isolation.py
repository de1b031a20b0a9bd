"""A fault of one task leaves its neighbours as they would be without it: the same losses, the same adapters.

Real dispatcher, loops and engines; faults are raised by engines that are told to, after the real computing has left its
marks in gradient buffers, which is the worst moment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mlora_worker.coordinator.dispatch.dispatcher import PipelineFault
from mlora_worker.coordinator.task.prepared import PreparedTask
from mlora_worker.coordinator.task.probe import PROBE
from mlora_worker.coordinator.task.run import TaskRun
from mlora_worker.data.prepare import TokenRow
from mlora_worker.data.training_rows.step_order import StepPlan
from mlora_worker.model.load import load_stage
from mlora_worker.pipeline.engine import StageEngine
from mlora_worker.pipeline.results import Backwarded, Forwarded, OutOfOrder, StageState
from mlora_worker.protocol import (
    DataCounts,
    Dataset,
    FailureReason,
    LoRAConfig,
    TaskPhase,
    TaskPlan,
    Training,
)
from mlora_worker.stream.costs import StageCost
from mlora_worker.stream.items import Load, Segment, Train
from mlora_worker.stream.planner import load_of, rows_per_step
from tests.fixtures.threaded import ThreadedPipeline

STEPS = 6
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass
class Injection:
    """Raise ``error`` on ``stage`` in ``phase`` whenever ``when`` says so of the task and the step."""

    stage: int
    phase: str
    when: Callable[[Train], bool]
    error: Callable[[], Exception]
    raised: int = 0

    def strike(self, stage: int, phase: str, train: Train) -> None:
        if (stage, phase) == (self.stage, self.phase) and self.when(train):
            self.raised += 1
            raise self.error()


class FaultyEngine(StageEngine):
    """Computes as ever, then raises."""

    injections: Sequence[Injection] = ()
    nan: tuple[int, str, int] | None = None  # stage, task and step from which its parameters are NaN

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._items: dict[int, Train] = {}

    def load(self, load: Load, state: Mapping[str, Tensor] | None = None) -> None:
        self._strike("load", of(load.task, 0))
        super().load(load, state)

    def settle(self, segment: Segment) -> None:
        if segment.update is not None:
            self._strike("update", of(segment.task, segment.update.step))
        super().settle(segment)

    def forward(self, item: Train, **tensors: Any) -> Forwarded:
        for segment in item.segments:
            if self.nan == (self.stage.index, segment.task, segment.step):
                parts = self.export(segment.task)
                self.restore(segment.task, {name: part.fill_(torch.nan) for name, part in parts.items()})
        self._items[item.number] = item
        out = super().forward(item, **tensors)
        self._strike("forward", item)
        return out

    def backward(self, number: int, grad: torch.Tensor | None) -> Backwarded:
        out = super().backward(number, grad)
        self._strike("backward", self._items.pop(number))
        return out

    def snapshot(self, task: str) -> StageState:
        self._strike("checkpoint", of(task, 0))
        return super().snapshot(task)

    def export(self, task: str) -> dict[str, torch.Tensor]:
        if not self.nan:
            self._strike("save", of(task, 0))
        return super().export(task)

    def _strike(self, phase: str, item: Train) -> None:
        for injection in self.injections:
            injection.strike(self.stage.index, phase, item)


def of(task: str, step: int) -> Train:
    segment = Segment(task=task, step=step, lengths=(1,), first_row=0, weight=0, closes_step=True)
    return Train(number=0, segments=(segment,))


def has(task: str, step: int) -> Callable[[Train], bool]:
    return lambda train: any((segment.task, segment.step) == (task, step) for segment in train.segments)


def out_of_memory() -> Exception:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def cpu_out_of_memory() -> Exception:
    return RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory")


def broken_kernel() -> Exception:
    return ValueError("a kernel met a shape that it does not know")


@dataclass
class Lab:
    """Makes pipelines of three tasks: ``bad``, which is to fail, and its neighbours ``wide`` and ``narrow``."""

    base: Any
    rows: Any
    whole: dict[int, ThreadedPipeline] = field(default_factory=dict)
    checkpoint_every: int = 50  # steps

    def run(
        self,
        stages: int,
        injections: Sequence[Injection] = (),
        *,
        names: Sequence[str] = ("wide", "bad", "narrow"),
        nan: tuple[int, str, int] | None = None,
        shared: bool = True,
        **options: Any,
    ) -> ThreadedPipeline:
        """``shared``: a microbatch costs so much that ``bad`` and ``narrow`` travel together, and ``wide`` for itself."""
        costs = [StageCost(1.0, per_microbatch=100.0)] * stages if shared else None
        engines = []
        for stage in range(stages):
            cpu = torch.device("cpu")
            engine = FaultyEngine(load_stage(self.base.folder, self.base, stage, stages, torch.float32, cpu))
            engine.injections, engine.nan = injections, nan
            engines.append(engine)
        return ThreadedPipeline(
            engines, {name: self._task(name) for name in names}, costs=costs, **options
        ).run()

    def _task(self, name: str) -> TaskRun:
        lora, training, seed = {
            "wide": (LoRAConfig(rank=8, alpha=16, dropout=0.2, target_modules=ALL), Training(batch_size=4), 1),
            "bad": (LoRAConfig(rank=4, alpha=8, target_modules=("q_proj", "down_proj")), Training(batch_size=3), 2),
            "narrow": (LoRAConfig(rank=2, alpha=8, target_modules=("v_proj",)), Training(batch_size=1), 3),
        }[name]  # fmt: skip
        training = training.model_copy(
            update={
                "max_steps": STEPS,
                "learning_rate": 2e-3,
                "max_grad_norm": 0.5,
                "seed": seed,
                "checkpoint_every_steps": self.checkpoint_every,
            }
        )
        rows = [
            TokenRow(ids=np.array(row.ids, np.int32), labels=np.array(row.labels, np.int32))
            for row in self.rows(12, seed)
        ]
        plan = TaskPlan(
            uid=name, namespace="test", name=name, admitted=True, base_model="tiny", lora=lora,
            dataset=Dataset(inline="{}"), training=training, output_uri="file:///nowhere",
        )  # fmt: skip
        counts = DataCounts(rows=len(rows), used=len(rows))
        task = TaskRun(plan, phase=TaskPhase.PREPARED)
        load = load_of([len(row.ids) for row in rows], rows_per_step(training))
        task.prepared = PreparedTask(rows, counts, StepPlan(len(rows), training), lora.target_modules, load)
        return task


@pytest.fixture
def lab(base: Any, rows: Any) -> Lab:
    return Lab(base, rows)


def assert_neighbours_are_as_without(
    found: ThreadedPipeline, wanted: ThreadedPipeline, names: Sequence[str] = ("wide", "narrow")
) -> None:
    """Losses and adapters of ``names`` are those of ``wanted``: bit for bit as long as they travelled alike."""
    assert found.error is None
    for name in names:
        assert found.tasks[name].phase is TaskPhase.SUCCEEDED, found.tasks[name].failure
        alike = True
        ours, theirs = found.microbatches_of(name), wanted.microbatches_of(name)
        for step in range(1, STEPS + 1):
            alike = alike and company(ours[step]) == company(theirs[step])
            loss, other = found.losses[name][step], wanted.losses[name][step]
            assert loss == (other if alike else pytest.approx(other, rel=1e-5)), (name, step)
        for key, tensor in wanted.adapters[name].items():
            difference = (found.adapters[name][key] - tensor).norm()
            assert difference <= (0 if alike else 1e-5 * tensor.norm()), (name, key)


def company(trains: Sequence[Train]) -> list[list[tuple[str, tuple[int, ...]]]]:
    return [[(segment.task, segment.lengths) for segment in train.segments] for train in trains]


def void(pipeline: ThreadedPipeline) -> list[Train]:
    numbers = {fault.number for fault in pipeline.faults}
    return [train for train in pipeline.trains if train.number in numbers]


STAGES = 3


@pytest.mark.parametrize("stage", range(STAGES))
@pytest.mark.parametrize(
    ("phase", "error", "reason"),
    [
        ("forward", broken_kernel, FailureReason.INTERNAL_ERROR),
        ("backward", broken_kernel, FailureReason.INTERNAL_ERROR),
        ("backward", out_of_memory, FailureReason.OUT_OF_MEMORY),
        ("update", cpu_out_of_memory, FailureReason.OUT_OF_MEMORY),
    ],
    ids=["exception-forward", "exception-backward", "memory-backward", "memory-update"],
)
def test_a_task_that_fails_on_any_stage_leaves_its_neighbours_as_they_were(
    lab: Lab, stage: int, phase: str, error: Callable[[], Exception], reason: FailureReason
) -> None:
    step = 3
    injection = Injection(stage, phase, has("bad", step - (phase == "update")), error)
    found = lab.run(STAGES, [injection], faults_are_late=stage == 1)
    wanted = lab.run(STAGES, withdraw_after={"bad": step - 1})
    assert injection.raised
    assert {segment.task for train in void(found) for segment in train.segments} == {"bad", "narrow"}
    bad = found.tasks["bad"]
    assert (bad.phase, bad.progress.step) == (TaskPhase.FAILED, step - 1)
    assert bad.failure is not None
    assert bad.failure.reason is reason
    assert f"stage {stage} " in bad.failure.message
    assert f"step {step}" in bad.failure.message
    assert "bad" not in found.adapters
    assert_neighbours_are_as_without(found, wanted)


@pytest.mark.parametrize(("phase", "stage"), [("load", 0), ("load", 2), ("save", 1)])
def test_a_task_that_cannot_be_made_or_saved_leaves_its_neighbours_as_they_were(
    lab: Lab, phase: str, stage: int
) -> None:
    injection = Injection(stage, phase, has("bad", 0), cpu_out_of_memory)
    found = lab.run(2 if stage < 2 else 3, [injection], faults_are_late=True)
    names = ("wide", "narrow") if phase == "load" else ("wide", "bad", "narrow")
    wanted = lab.run(2 if stage < 2 else 3, names=names)
    assert found.tasks["bad"].phase is TaskPhase.FAILED
    assert "bad" not in found.adapters
    assert_neighbours_are_as_without(found, wanted)


@pytest.mark.parametrize(
    ("phase", "stage", "step", "every", "again"),
    [
        ("load", 0, 0, 50, 1),
        ("load", 1, 0, 50, 1),
        ("update", 0, 3, 50, 1),
        ("update", 1, 3, 2, 3),
        ("checkpoint", 1, 0, 2, 1),
        ("save", 1, 0, 4, 5),
    ],
)
@pytest.mark.parametrize("late", [False, True], ids=["at-once", "late"])
def test_a_task_whose_adapter_found_no_memory_beside_others_goes_on_from_its_checkpoint_when_there_is_room(
    lab: Lab, phase: str, stage: int, step: int, every: int, again: int, late: bool
) -> None:
    """``again``: the first step that is repeated."""
    lab.checkpoint_every = every
    shots = iter([True])
    injection = Injection(
        stage, phase, lambda train: has("bad", step)(train) and next(shots, False), cpu_out_of_memory
    )
    found = lab.run(2, [injection], faults_are_late=late)
    assert injection.raised == 1
    assert_neighbours_are_as_without(found, lab.run(2), ["wide", "bad", "narrow"])
    assert found.dispatcher.exhausted or late or phase == "save"  # then its neighbours may be gone already
    for exhausted in found.dispatcher.exhausted:
        assert exhausted.stage == stage
        assert {"bad"} < set(exhausted.tasks)
    loads = [item for item in found.items if isinstance(item, Load) and item.task == "bad"]
    assert len(loads) == 2
    after = [
        segment.step
        for train in found.trains
        for segment in train.segments
        if segment.task == "bad" and train.number > loads[1].number
    ]
    assert after[0] == again


def test_a_task_whose_adapter_finds_no_memory_even_alone_fails(lab: Lab) -> None:
    injection = Injection(1, "load", has("bad", 0), cpu_out_of_memory)
    found = lab.run(2, [injection])
    bad = found.tasks["bad"]
    assert bad.failure is not None
    assert bad.failure.reason is FailureReason.OUT_OF_MEMORY
    assert injection.raised >= 2, "beside others, and alone"
    assert_neighbours_are_as_without(found, lab.run(2, names=("wide", "narrow")))


@pytest.mark.parametrize("stage", range(2))
def test_parameters_that_are_nan_fail_their_task_and_nobody_else(lab: Lab, stage: int) -> None:
    found = lab.run(2, nan=(stage, "bad", 3))
    wanted = lab.run(2, withdraw_after={"bad": 2})
    failure = found.tasks["bad"].failure
    assert failure is not None
    assert failure.reason is FailureReason.NON_FINITE_LOSS
    assert "step 3 of 6" in failure.message
    assert "bad" not in found.adapters
    assert_neighbours_are_as_without(found, wanted)


def test_a_neighbour_that_shares_nothing_with_the_fault_is_the_same_bit_for_bit(lab: Lab) -> None:
    """One row a step travels in one microbatch of its own, whoever else is there."""
    injection = Injection(1, "backward", has("bad", 2), broken_kernel)
    names = ("narrow", "bad")
    found = lab.run(2, [injection], names=names, shared=False)
    wanted = lab.run(2, names=("narrow",), shared=False)
    assert all(len(train.segments) == 1 for train in found.trains)
    assert company(sum(found.microbatches_of("narrow").values(), ())) == company(wanted.trains)
    assert_neighbours_are_as_without(found, wanted, ["narrow"])


def test_a_fault_that_passes_costs_a_repeated_step_and_changes_nothing(lab: Lab) -> None:
    shots = iter([True])
    injection = Injection(
        1, "backward", lambda train: has("bad", 3)(train) and next(shots, False), broken_kernel
    )
    found = lab.run(2, [injection])
    assert_neighbours_are_as_without(found, lab.run(2), ["wide", "bad", "narrow"])
    assert injection.raised == 1
    repeated = [train for train in found.trains if any(segment.discard for segment in train.segments)]
    assert repeated
    assert all(len(train.segments) == 1 for train in repeated), "suspects repeat their step alone"


def test_a_microbatch_too_wide_for_the_memory_is_nobodys_fault(lab: Lab) -> None:
    limit = 60
    injection = Injection(0, "forward", lambda train: train.tokens > limit, out_of_memory)
    found = lab.run(1, [injection])
    assert injection.raised
    assert_neighbours_are_as_without(found, lab.run(1), ["wide", "bad", "narrow"])
    assert all(train.tokens <= limit for train in found.trains[-6:]), "it learns to stay below"
    assert injection.raised <= 8


def test_memory_that_lacks_for_a_single_row_fails_its_task_alone(lab: Lab) -> None:
    injection = Injection(
        1, "forward", lambda train: any(s.task == "bad" for s in train.segments), out_of_memory
    )
    found = lab.run(2, [injection])
    failure = found.tasks["bad"].failure
    assert failure is not None
    assert failure.reason is FailureReason.OUT_OF_MEMORY
    tries = [train for trains in found.microbatches_of("bad").values() for train in trains]
    assert len(tries[-1].segments[0].lengths) == 1, "it was given narrower microbatches first"
    assert_neighbours_are_as_without(found, lab.run(2, names=("wide", "narrow")))


def test_two_tasks_that_fail_at_once_fail_both_and_the_third_goes_on(lab: Lab) -> None:
    injections = [
        Injection(0, "backward", has("bad", 2), broken_kernel),
        Injection(1, "forward", has("narrow", 2), broken_kernel),
    ]
    found = lab.run(2, injections)
    assert [found.tasks[name].phase for name in ("bad", "narrow")] == [TaskPhase.FAILED] * 2
    wanted = lab.run(2, withdraw_after={"bad": 1, "narrow": 1})
    assert_neighbours_are_as_without(found, wanted, ["wide"])


def test_an_error_that_every_task_meets_alone_is_the_pipelines_and_fails_no_task(lab: Lab) -> None:
    def every_task(train: Train) -> bool:
        return train.segments[0].step == 2 or train.segments[0].task == PROBE

    found = lab.run(2, [Injection(1, "forward", every_task, broken_kernel)])
    assert isinstance(found.error, PipelineFault)
    assert "stage 1: ValueError: a kernel met a shape" in str(found.error)
    assert not any(task.phase is TaskPhase.FAILED for task in found.tasks.values())


def test_an_error_that_a_good_microbatch_does_not_meet_is_the_tasks_however_many_meet_it(lab: Lab) -> None:
    """Rows that no model can take: the witness, which is made up, trains on real stages."""
    injection = Injection(1, "forward", lambda train: train.segments[0].step == 2, broken_kernel)
    found = lab.run(2, [injection])
    assert found.error is None
    assert all(task.phase is TaskPhase.FAILED for task in found.tasks.values())
    assert all(task.failure.reason is FailureReason.INTERNAL_ERROR for task in found.tasks.values())


@pytest.mark.parametrize(
    "error",
    [
        OutOfOrder("the ranks do not agree"),
        torch.AcceleratorError("an illegal memory access was encountered"),
    ],
    ids=["stream", "device"],
)
def test_what_no_rank_survives_ends_the_group(lab: Lab, error: Exception) -> None:
    found = lab.run(2, [Injection(1, "forward", has("bad", 2), lambda: error)])
    assert found.error is error
    assert not any(task.phase is TaskPhase.FAILED for task in found.tasks.values())
