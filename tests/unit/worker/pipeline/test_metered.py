"""Samples of real microbatches: exact, of the right size, and without a trace in what is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch

from mlora_worker.frozen.four_bits import nf4
from mlora_worker.frozen.int8 import int8
from mlora_worker.frozen.linear import Freeze
from mlora_worker.frozen.plain import PlainWeight
from mlora_worker.model.load import load_stage
from mlora_worker.pipeline.allocations import CpuLedger
from mlora_worker.pipeline.calibrate import TASK, calibrate
from mlora_worker.pipeline.engine import StageEngine
from mlora_worker.pipeline.metered import MeteredEngine, Sampling
from mlora_worker.pipeline.results import OutOfOrder
from mlora_worker.pipeline.samples import MOST_PER_STAGE, SampleBook
from mlora_worker.protocol import LoRAConfig, MemorySample, Training
from mlora_worker.stream.items import Load, Segment, Train
from tests.fixtures.small_models import small_model  # noqa: F401
from tests.fixtures.stage_steps import TASKS, train

CPU = torch.device("cpu")


def engine_of(
    saved: Any, deliver: Callable[[MemorySample], None] | None, freeze: Freeze = PlainWeight
) -> StageEngine:
    stage = load_stage(saved.folder, saved, 0, 1, torch.float32, CPU, freeze)
    engine = StageEngine(stage) if deliver is None else MeteredEngine(stage, deliver)
    for seed, (task, lora) in enumerate(TASKS.items()):
        engine.load(Load(number=0, task=task, lora=lora, training=Training(seed=seed)))
    return engine


def test_a_ledger_counts_blocks_to_the_byte_and_knows_the_most_at_once() -> None:
    ledger = CpuLedger()
    with ledger.follow("forward"):
        kept = torch.empty(1000)
        passing = torch.empty(500)
        del passing
        other = torch.empty(100)
    assert (ledger.peak("forward"), ledger.held) == (6000, 4400)
    with ledger.follow("backward"):
        del kept
    assert ledger.held == 400
    del other


def test_a_matrix_that_becomes_dense_is_passed_over_and_what_comes_after_it_is_not() -> None:
    for weight in (nf4(torch.randn(96, 64), double=True), int8(torch.randn(96, 64))):
        ledger = CpuLedger()
        with ledger.follow("forward"):
            dense = weight.dense(torch.float32)
            kept = torch.empty(100)
            del dense
        assert (ledger.peak("forward"), ledger.held) == (400, 400)
        del kept


def test_blocks_that_were_there_before_are_not_counted() -> None:
    before = [torch.empty(10_000)]
    ledger = CpuLedger()
    with ledger.follow("forward"):
        before.clear()
    assert (ledger.peak("forward"), ledger.held) == (0, 0)


@pytest.mark.parametrize("freeze", [partial(nf4, double=True), int8], ids=["nf4", "int8"])
def test_a_quantised_base_is_measured_as_the_plain_one_for_dense_matrices_are_counted_by_themselves(
    small_model: Callable[..., Any],  # noqa: F811
    freeze: Freeze,
) -> None:
    saved, samples = small_model(), dict[Freeze, list[MemorySample]]()
    for kind in (PlainWeight, freeze):
        samples[kind] = []
        train(engine_of(saved, samples[kind].append, kind), 2)
    plain, quantised = (
        [(one.kept_bytes, one.forward_bytes, one.backward_bytes) for one in samples[kind]]
        for kind in (PlainWeight, freeze)
    )
    assert plain[1:] == quantised[1:], "the first one of a process also compiles kernels"
    assert len(plain) > 1


def test_measuring_changes_nothing_that_is_trained(small_model: Callable[..., Any]) -> None:  # noqa: F811
    saved, taken = small_model(), []
    plain = train(engine_of(saved, None), 3)
    measured = train(engine_of(saved, taken.append), 3)
    assert all(torch.equal(a, b) for a, b in zip(plain[0], measured[0], strict=True))
    assert all(
        torch.equal(plain[1][task][name], measured[1][task][name])
        for task in TASKS
        for name in plain[1][task]
    )
    assert len(taken) == 3
    assert all(
        0 < one.kept_bytes <= one.forward_bytes and one.backward_bytes > one.kept_bytes for one in taken
    )


def test_calibration_leaves_nothing_behind(small_model: Callable[..., Any]) -> None:  # noqa: F811
    saved, taken = small_model(), []
    before = torch.get_rng_state()
    engine = engine_of(saved, taken.append)
    assert isinstance(engine, MeteredEngine)
    assert calibrate(engine, microbatch_tokens=4096) == len(taken) == 5
    assert all(one.calibration for one in taken)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(OutOfOrder):
        engine.export(TASK)
    plain, calibrated = train(engine_of(saved, None), 2), train(engine, 2)
    assert all(torch.equal(a, b) for a, b in zip(plain[0], calibrated[0], strict=True))
    assert not any(one.calibration for one in taken[5:])


def with_each(saved: Any, loras: Iterable[LoRAConfig]) -> list[MemorySample]:
    """What the same rows take on the last of two stages with each of ``loras``."""
    taken: list[MemorySample] = []
    engine = MeteredEngine(load_stage(saved.folder, saved, 1, 2, torch.float32, CPU), taken.append)
    for number, lora in enumerate(loras):
        name = f"task-{number}"
        engine.load(Load(number=0, task=name, lora=lora, training=Training()))
        segment = Segment(task=name, step=1, lengths=(20, 31), first_row=0, weight=1, closes_step=True)
        ids = torch.arange(51)
        engine.forward(
            Train(number=1, segments=(segment,)), token_ids=None, hidden=torch.zeros(51, 32), labels=ids
        )
        engine.backward(1, None)
    return taken


def test_the_exact_part_is_what_an_adapter_adds(small_model: Callable[..., Any]) -> None:  # noqa: F811
    """The same rows with one group of modules more: what is kept grows by just what is told."""
    targets = (("q_proj",), ("q_proj", "down_proj"))
    loras = [LoRAConfig(rank=4, alpha=4, target_modules=own) for own in targets]
    a, b = with_each(small_model(num_hidden_layers=4), loras)
    assert b.exact_bytes - a.exact_bytes == 51 * (48 + 4) * 4 * 2
    assert b.kept_bytes - a.kept_bytes == b.exact_bytes - a.exact_bytes


def test_dora_keeps_its_modules_outputs_and_copies_a_groups_gradients(
    small_model: Callable[..., Any],  # noqa: F811
) -> None:
    plain = LoRAConfig(rank=4, alpha=4, target_modules=("q_proj", "down_proj"))
    a, b = with_each(small_model(num_hidden_layers=4), [plain, plain.model_copy(update={"use_dora": True})])
    assert b.kept_bytes - a.kept_bytes == 51 * (32 + 32) * 4 * 2
    widest = 48 + 48  # of gate and up
    assert b.exact_bytes - a.exact_bytes == b.kept_bytes - a.kept_bytes + 51 * widest * 4
    assert b.backward_bytes - a.backward_bytes <= b.exact_bytes - a.exact_bytes


def test_few_microbatches_are_measured_once_the_widths_are_known() -> None:
    sampling = Sampling()
    assert [sampling.takes(100) for _ in range(8)] == [True] * 6 + [False] * 2
    assert sampling.takes(200), "wider than all before"
    assert sum(sampling.takes(150) for _ in range(640)) == 10


def test_a_report_carries_a_bounded_number_of_samples_and_those_of_the_calibration() -> None:
    book = SampleBook(stages=2)
    for number in range(100):
        book.add(MemorySample(stage=1, tokens=number + 1, squared_tokens=1, calibration=number < 5))
    kept = book.all()
    assert len(kept) <= MOST_PER_STAGE
    assert [one.tokens for one in kept[:5]] == [1, 2, 3, 4, 5]
    assert kept[-1].tokens == 100
