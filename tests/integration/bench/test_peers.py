"""Every side of a benchmark computes the same thing, on the tiny model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bench.base import whole_stage
from bench.limit import FrozenBase
from bench.ours import Ours
from bench.peers.peft_padded import PeftPadded
from bench.quantised import KINDS, TARGETS, qlora_base, quantised_stage
from bench.rows import deal
from bench.sides import Disagreement, Setting, check_losses, train_alike
from bench.throughput import ALL_LINEAR, ATTENTION_ONLY, PEERS, Configuration, build, measure
from mlora_worker.data.prepare import TokenRow

MakeRows = Callable[[int], list[TokenRow]]
TASKS, BATCH = 3, 2

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize(
    ("targets", "dtype", "tolerance"),
    [
        (ATTENTION_ONLY, torch.float32, 1e-5),
        (ALL_LINEAR, torch.float32, 1e-5),
        (ATTENTION_ONLY, torch.bfloat16, 2e-3),
    ],
    ids=["q,k,v,o", "all-linear", "bfloat16"],
)
def test_a_peers_losses_equal_ours_step_by_step(
    tiny_model: Path,
    make_rows: MakeRows,
    peer: str,
    targets: tuple[str, ...],
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    sides = build(tiny_model, dtype, Setting(TASKS, targets, dropout=0.0), [peer])
    ours = sides["ours"]
    assert isinstance(ours, Ours)
    sides[peer].restore(ours.adapters())  # type: ignore[attr-defined]
    # The same rows again and again: the losses fall by far more than the tolerance.
    train_alike(ours, [sides[peer]], [deal(make_rows(6), TASKS, BATCH, 0)] * 5, tolerance, learning_rate=3e-3)


def test_qloras_losses_equal_ours_step_by_step(tiny_model: Path, make_rows: MakeRows) -> None:
    setting = Setting(TASKS, TARGETS, dropout=0.0)
    ours = Ours(quantised_stage(tiny_model, KINDS["ours"]), setting)
    theirs = PeftPadded(qlora_base(tiny_model), setting)
    theirs.restore(ours.adapters())
    train_alike(ours, [theirs], [deal(make_rows(6), TASKS, BATCH, 0)] * 5, 1e-4, learning_rate=3e-3)
    other = Ours(quantised_stage(tiny_model, KINDS["ours_int8"]), setting)
    batches = [deal(make_rows(6), TASKS, BATCH, 0)]
    with pytest.raises(Disagreement):  # int8 is another base
        train_alike(theirs, [other], batches, 1e-4, learning_rate=0.0)


def test_a_peer_with_other_adapters_is_found_out(tiny_model: Path, make_rows: MakeRows) -> None:
    sides = build(tiny_model, torch.float32, Setting(TASKS, ATTENTION_ONLY, dropout=0.0), ["peft"])
    batches = [deal(make_rows(18), TASKS, BATCH, step) for step in range(3)]
    with pytest.raises(Disagreement):
        train_alike(sides["ours"], [sides["peft"]], batches, 1e-4, learning_rate=1e-2)


@pytest.mark.parametrize("adapted", [False, True])
def test_the_frozen_base_has_the_losses_of_untrained_adapters(
    tiny_model: Path, make_rows: MakeRows, adapted: bool
) -> None:
    batch = deal(make_rows(6), TASKS, BATCH, 0)
    ours = Ours(whole_stage(tiny_model, torch.float32), Setting(TASKS, ALL_LINEAR), separate_updates=True)
    base = FrozenBase(whole_stage(tiny_model, torch.float32), adapted=adapted)
    check_losses({"ours": ours.step(batch, 0.0), "base": base.step(batch, 0.0)}, 1e-5)
    assert set(ours.watch.parts) == {"forward", "backward", "update"}
    assert set(base.watch.parts) == {"forward", "backward"}


def test_a_measurement_has_a_figure_for_each_peer_that_ran(tiny_model: Path, make_rows: MakeRows) -> None:
    configuration = Configuration(ATTENTION_ONLY, torch.float32, 1.0)
    measured = measure(configuration, tiny_model, tiny_model, make_rows(24), ("packed",), fixed=2, until=0.0)
    found = measured.as_json()
    assert found["repetitions"] == len(measured.times) == 2
    assert set(found["tokens_per_second"]) == {"ours", "packed"}
    assert found["vs_packed"] > 0
    assert found["vs_mlora"] is None
    assert found["loss_difference"] < 1e-4
