"""Training by stages in shared microbatches equals training each task alone with PEFT."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mlora_worker.protocol import LoRAConfig, Schedule, Training

TRAINING = Training(
    batch_size=3,
    gradient_accumulation_steps=2,
    learning_rate=2e-3,
    schedule=Schedule.COSINE,
    warmup_steps=3,
    max_grad_norm=0.5,
    weight_decay=0.01,
    seed=11,
)
ATTENTION = LoRAConfig(rank=8, alpha=16, target_modules=("q_proj", "k_proj", "v_proj", "o_proj"))
STEPS = 10


@pytest.fixture
def alone(kit: Any, rows: Any) -> Any:
    return kit.task("alone", ATTENTION, TRAINING, rows(24, 1), STEPS)


@pytest.fixture
def neighbours(kit: Any, rows: Any) -> list[Any]:
    """Other rank, alpha, targets, dropout, batch size and number of steps."""
    return [
        kit.task(
            "wide",
            LoRAConfig(rank=20, alpha=8, dropout=0.3, target_modules=("all-linear",)),
            Training(batch_size=3, learning_rate=5e-3, seed=3),
            rows(10, 2),
            STEPS - 4,
        ),
        kit.task(
            "narrow",
            LoRAConfig(rank=1, alpha=4, target_modules=("down_proj",)),
            Training(batch_size=1, learning_rate=1e-3, max_grad_norm=0.0, seed=4),
            rows(5, 3),
            STEPS,
        ),
    ]


@pytest.mark.parametrize(
    "lora",
    [
        ATTENTION,
        LoRAConfig(rank=4, alpha=4, target_modules=("all-linear",)),
        ATTENTION.model_copy(update={"dropout": 0.25}),
    ],
    ids=["attention", "all-linear", "dropout"],
)
def test_training_equals_peft_with_a_plain_padded_loop(
    kit: Any, base: Any, rows: Any, lora: LoRAConfig
) -> None:
    compare_with_peft(kit, base, kit.task("t", lora, TRAINING, rows(24, 1), STEPS), stages=2)


def test_training_with_a_head_of_its_own_equals_peft(kit: Any, untied_base: Any, alone: Any) -> None:
    compare_with_peft(kit, untied_base, alone, stages=1)


def compare_with_peft(kit: Any, base: Any, task: Any, stages: int) -> None:
    ours = kit.train(kit.chain(base, stages), [task], rows_per_microbatch=2)[task.name]
    theirs = kit.peft(base, task, ours.start)
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-4)
    assert kit.difference(ours.adapter, theirs.adapter) < 1e-4


@pytest.mark.parametrize("stages", [2, 3])
def test_the_number_of_stages_changes_nothing(
    kit: Any, base: Any, alone: Any, neighbours: list[Any], stages: int
) -> None:
    one = kit.train(kit.chain(base, 1), [alone, *neighbours])
    more = kit.train(kit.chain(base, stages), [alone, *neighbours])
    for name in one:
        assert kit.difference(more[name].adapter, one[name].adapter) < 1e-5
        assert more[name].losses == pytest.approx(one[name].losses, rel=1e-6)


def test_neighbours_change_nothing(kit: Any, base: Any, alone: Any, neighbours: list[Any]) -> None:
    tasks = [neighbours[0], alone, neighbours[1]]
    together = kit.train(kit.chain(base, 2), tasks)
    for task in tasks:
        single = kit.train(kit.chain(base, 2), [task])[task.name]
        assert kit.difference(together[task.name].adapter, single.adapter) < 1e-5
        assert together[task.name].losses == pytest.approx(single.losses, rel=1e-6)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_cutting_a_step_into_microbatches_changes_nothing(
    kit: Any, base: Any, rows: Any, dropout: float
) -> None:
    lora = ATTENTION.model_copy(update={"dropout": dropout})
    task = kit.task("t", lora, TRAINING, rows(24, 1), 6)
    whole = kit.train(kit.chain(base, 1), [task])["t"]
    cut = kit.train(kit.chain(base, 1), [task], rows_per_microbatch=3)["t"]
    assert cut.losses == pytest.approx(whole.losses, rel=1e-4)
    assert kit.difference(cut.adapter, whole.adapter) < 1e-4


def test_every_module_of_every_adapter_learns_and_the_base_stays_as_it_is(
    kit: Any, base: Any, alone: Any, neighbours: list[Any]
) -> None:
    chain = kit.chain(base, 3)
    before = [tensor.clone() for tensor in chain.base_weights()]
    trained = kit.train(chain, [alone, *neighbours])
    for task in (alone, *neighbours):
        adapter = trained[task.name].adapter
        assert all(tensor.isfinite().all() for tensor in adapter.values())
        assert all(tensor.any() for name, tensor in adapter.items() if "lora_B" in name)
    assert all(map(torch.equal, before, chain.base_weights()))


def test_a_step_without_supervised_tokens_adds_nothing(kit: Any, base: Any, rows: Any) -> None:
    some = rows(4, 5)
    masked = [kit.row(row.ids, tuple([-100] * len(row.ids))) for row in rows(2, 6)]
    training = Training(batch_size=2, learning_rate=1e-3, schedule=Schedule.CONSTANT)
    with_gap = kit.task("t", ATTENTION, training, [*some[:2], *masked, *some[2:]], 3)
    trained = kit.train(kit.chain(base, 2), [with_gap, kit.task("n", ATTENTION, training, some, 3)])
    without = kit.train(kit.chain(base, 2), [kit.task("t", ATTENTION, training, some, 2)])
    assert trained["t"].losses[1] == 0.0
    assert kit.difference(trained["t"].adapter, without["t"].adapter) < 1e-5
