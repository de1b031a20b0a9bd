"""Training equals Hugging Face PEFT with a plain loop: the same rows in the same order, 50 steps.

An epoch's last step has fewer rows, so its mini-batches are short, too; a step's loss is the mean over all its supervised
tokens, however they lie in mini-batches.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mlora_worker.protocol import LoRAConfig, Schedule, Training
from tests.equivalence.plain_peft import train_with_peft
from tests.equivalence.tasks import Base, Row, Task, assert_same, train

STEPS = 50
ATTENTION = LoRAConfig(rank=8, alpha=16, target_modules=("q_proj", "k_proj", "v_proj", "o_proj"))
ACCUMULATED = Training(
    batch_size=4,
    gradient_accumulation_steps=2,
    learning_rate=2e-3,
    schedule=Schedule.COSINE,
    warmup_steps=5,
    max_grad_norm=0.85,
    weight_decay=0.01,
    seed=11,
)


@pytest.mark.parametrize(
    ("story", "lora", "training", "stages", "budget"),
    [
        ("everything at once, steps cut into microbatches", ATTENTION, ACCUMULATED, 1, 90),
        (
            "dropout, with PEFT's masks replaced by ours; two stages",
            LoRAConfig(rank=4, alpha=4, dropout=0.25, target_modules=("all-linear",)),
            Training(batch_size=6, learning_rate=1e-3, schedule=Schedule.LINEAR, warmup_steps=2, seed=2),
            2,
            10_000,
        ),
        (
            "no clipping, no warm-up, no decay",
            LoRAConfig(rank=16, alpha=8, target_modules=("v_proj", "down_proj")),
            Training(batch_size=5, learning_rate=5e-4, schedule=Schedule.CONSTANT, max_grad_norm=0.0, seed=3),
            1,
            10_000,
        ),
    ],
    ids=["accumulation", "dropout", "plain"],
)
def test_fifty_steps_equal_peft(
    base: Base,
    rows: Callable[..., list[Row]],
    story: str,
    lora: LoRAConfig,
    training: Training,
    stages: int,
    budget: int,
) -> None:
    task = Task("t", lora, training, rows(29, 1), STEPS)
    assert len(task.batch(task.plan.steps_per_epoch)) < len(task.batch(1)), "a short last step"
    ours = train(base, stages, [task], budget=budget)["t"]
    theirs = train_with_peft(base, task, ours.start)
    assert_same(ours, theirs, losses=1e-4, weights=1e-4)
    if training is ACCUMULATED:
        assert min(theirs.norms) < training.max_grad_norm < max(theirs.norms), (
            "some steps are clipped, others not"
        )
    first, last = ours.losses[0], ours.losses[-1]
    assert first is not None
    assert last is not None
    assert last < first, story


def test_a_head_of_its_own_equals_peft(untied_base: Base, rows: Callable[..., list[Row]]) -> None:
    task = Task("t", ATTENTION, ACCUMULATED, rows(29, 1), 10)
    ours = train(untied_base, 2, [task])["t"]
    assert_same(ours, train_with_peft(untied_base, task, ours.start), losses=1e-4, weights=1e-4)


def test_a_step_without_supervised_tokens_adds_nothing_and_takes_no_step(
    base: Base, rows: Callable[..., list[Row]]
) -> None:
    """One epoch of five steps, the second without any; of the fourth, one mini-batch of two has none."""
    training = ACCUMULATED.model_copy(update={"batch_size": 2, "learning_rate": 1e-2})
    task = Task("t", ATTENTION, training, rows(20, 5), 5)
    order = [task.plan.rows_of_step(step) for step in range(1, 6)]
    unlearnt = {*order[1], *order[3][:2]}
    masked = [row.masked if index in unlearnt else row for index, row in enumerate(task.rows)]
    task = Task("t", ATTENTION, training, masked, 5)
    assert [task.supervised(step) > 0 for step in range(1, 6)] == [True, False, True, True, True]
    ours = train(base, 2, [task, Task("n", ATTENTION, training, rows(20, 6), 5)], budget=50)["t"]
    assert ours.losses[1] is None
    assert max(ours.microbatches) > 1
    assert_same(ours, train_with_peft(base, task, ours.start), losses=1e-4, weights=1e-4)
