"""Every kind of adapter equals PEFT's own, over 20 steps: alone, beside neighbours of other kinds, on 1, 2 and 3 stages."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from peft import PeftModel
from peft.optimizers import create_loraplus_optimizer

from mlora_worker.protocol import LoRAConfig, Optimizer, Schedule, Training
from tests.equivalence.plain_peft import train_with_peft
from tests.equivalence.tasks import Base, Row, Task, Trained, assert_same, train
from tests.equivalence.test_resume import assert_bit_identical, crash_at, play, whole
from tests.fixtures.memory_store import MemoryStore

STEPS = 20
TRAINING = Training(
    batch_size=3,
    gradient_accumulation_steps=2,
    learning_rate=2e-3,
    schedule=Schedule.COSINE,
    warmup_steps=3,
    max_grad_norm=0.8,
    weight_decay=0.05,
    seed=5,
    checkpoint_every_steps=5,
)
MODULES = ("q_proj", "v_proj", "up_proj", "down_proj")
KINDS = {
    "plain": LoRAConfig(rank=8, alpha=16, target_modules=("all-linear",)),
    "loraplus": LoRAConfig(rank=8, alpha=16, target_modules=MODULES, loraplus_lr_ratio=8.0),
}


def task(kind: str, rows: Callable[..., list[Row]]) -> Task:
    training = TRAINING
    if kind == "loraplus":
        training = training.model_copy(update={"learning_rate": 5e-4})
    return Task(kind, KINDS[kind], training, rows(29, len(kind)), STEPS)


def loraplus(model: PeftModel, training: Training) -> torch.optim.Optimizer:
    return create_loraplus_optimizer(
        model,
        torch.optim.AdamW,
        lr=training.learning_rate,
        loraplus_lr_ratio=8.0,
        loraplus_weight_decay=training.weight_decay,
    )


def with_peft(base: Base, task: Task, ours: Trained) -> Trained:
    optimizer = loraplus if task.lora.loraplus_lr_ratio else None
    return train_with_peft(base, task, ours.start, optimizer_of=optimizer)


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "plain"])
def test_twenty_steps_equal_peft_alone_and_beside_other_kinds(
    base: Base, rows: Callable[..., list[Row]], kind: str, stages: int
) -> None:
    subject, others = task(kind, rows), [task(other, rows) for other in KINDS if other != kind]
    alone = train(base, stages, [subject], budget=90)[kind]
    assert_same(alone, with_peft(base, subject, alone), losses=1e-4, weights=1e-4)
    beside = train(base, stages, [others[0], subject, *others[1:]], budget=200)
    assert_same(beside[kind], alone, losses=1e-5, weights=1e-4)
    for other in others:
        assert_same(beside[other.name], train(base, 1, [other])[other.name], losses=1e-5, weights=1e-4)
    first, last = alone.losses[0], alone.losses[-1]
    assert first is not None
    assert last is not None
    assert last < first


def test_the_ratio_of_loraplus_is_noticed(base: Base, rows: Callable[..., list[Row]]) -> None:
    subject = task("loraplus", rows)
    ours = train(base, 1, [subject])["loraplus"]
    with pytest.raises(AssertionError):
        assert_same(ours, train_with_peft(base, subject, ours.start), losses=1e-4, weights=1e-4)


@pytest.mark.parametrize("optimizer", ["adamw", "lion"])
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("kind", list(KINDS))
def test_every_kind_resumes_from_its_checkpoint_bit_for_bit(
    base: Base, rows: Callable[..., list[Row]], kind: str, stages: int, optimizer: str
) -> None:
    subject = task(kind, rows)
    numbers = Optimizer.model_validate({"type": optimizer})
    training = subject.training.model_copy(update={"optimizer": numbers})
    subject = Task("subject", subject.lora, training, subject.rows, STEPS)
    undisturbed = whole(play(base, stages, [subject]), subject)
    store = MemoryStore()
    play(base, stages, [subject], store=store, script=crash_at(12, saved=10))
    found = whole(play(base, stages, [subject], store=store), subject)
    assert found.tasks["subject"].checkpoint.resumed_step in (10, 12)
    assert_bit_identical(found, undisturbed, "subject")
