"""Weights of rows: the loss of a step is sum(w S) / sum(w n), whatever shares or cuts its microbatches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

from mlora_worker.coordinator.task.evaluation import EvaluationRows
from mlora_worker.protocol import Evaluation, LoRAConfig, Schedule, Training
from mlora_worker.stream.items import Train
from tests.equivalence.plain_peft import train_with_peft
from tests.equivalence.tasks import IGNORED, Base, Row, Task, assert_same, engines_of, train
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.threaded import Crashed, ThreadedPipeline

Rows = Callable[..., list[Row]]
STEPS = 10
LORA = LoRAConfig(rank=8, alpha=16, dropout=0.1, target_modules=("q_proj", "v_proj", "down_proj"))
TRAINING = Training(
    batch_size=3, gradient_accumulation_steps=2, learning_rate=3e-3, schedule=Schedule.COSINE, warmup_steps=2,
    weight_decay=0.01, max_grad_norm=0.5, seed=11, checkpoint_every_steps=3,
)  # fmt: skip
WEIGHTS = (1.0, 0.25, 3.0, 0.001, 7.5, 1.0, 2.0)


def weighted(rows: Sequence[Row], weights: Sequence[float] = WEIGHTS) -> list[Row]:
    return [replace(row, weight=weights[place % len(weights)]) for place, row in enumerate(rows)]


def subject(rows: Sequence[Row]) -> Task:
    return Task("subject", LORA, TRAINING, rows, STEPS)


@pytest.mark.parametrize(
    ("stages", "budget", "neighbours"), [(1, 10_000, False), (1, 40, True), (2, 10_000, True), (3, 40, True)]
)
def test_it_trains_what_a_plain_loop_over_peft_trains(
    base: Base, rows: Rows, stages: int, budget: int, neighbours: bool
) -> None:
    task = subject(weighted(rows(25, 1)))
    others = [
        Task("plain", LORA, TRAINING, rows(20, 2), STEPS),
        Task("heavy", LORA, TRAINING, weighted(rows(20, 3), (1e6, 1.0)), STEPS),
    ]
    found = train(base, stages, [*others[: 2 * neighbours], task], budget=budget)["subject"]
    wanted = train_with_peft(base, task, found.start)
    assert_same(found, wanted, losses=1e-5, weights=1e-4)
    without = train_with_peft(base, subject(rows(25, 1)), found.start)
    assert max(abs(one - other) for one, other in zip(found.losses, without.losses, strict=True)) > 1e-3  # type: ignore[operator]


@pytest.mark.parametrize("weight", [3.0, 1e-300, 1e300])
def test_rows_that_all_weigh_the_same_train_as_without_weights_to_the_bit(
    base: Base, rows: Rows, weight: float
) -> None:
    plain = train(base, 2, [subject(rows(25, 1))], budget=60)["subject"]
    same = train(base, 2, [subject(weighted(rows(25, 1), (weight,)))], budget=60)["subject"]
    assert same.losses == plain.losses
    assert all(torch.equal(same.adapter[name], plain.adapter[name]) for name in plain.adapter)


def test_only_the_ratio_of_weights_counts(base: Base, rows: Rows) -> None:
    """To the bit where the factor is a power of two."""
    some = train(base, 1, [subject(weighted(rows(25, 1)))])["subject"]
    larger = [one * 2.0**700 for one in WEIGHTS]
    other = train(base, 1, [subject(weighted(rows(25, 1), larger))])["subject"]
    assert some.losses == other.losses
    assert all(torch.equal(some.adapter[name], other.adapter[name]) for name in some.adapter)


@pytest.mark.parametrize("stages", [1, 2])
def test_an_interrupted_task_goes_on_to_the_same_bits(base: Base, rows: Rows, stages: int) -> None:
    task, store = subject(weighted(rows(25, 1))), MemoryStore()

    def crash(pipeline: ThreadedPipeline) -> None:
        run = pipeline.tasks["subject"]
        if run.progress.step >= 5 and run.checkpoint.stored_step >= 3:
            pipeline.crash()

    def play(script: Callable[[ThreadedPipeline], None] | None, store: MemoryStore) -> ThreadedPipeline:
        runs = {"subject": task.prepared()}
        return ThreadedPipeline(engines_of(base, stages), runs, store=store, script=script).run(20)

    whole = play(None, MemoryStore())
    assert isinstance(play(crash, store).error, Crashed)
    resumed = play(None, store)
    assert resumed.error is None
    assert resumed.tasks["subject"].checkpoint.resumed_step == 3
    assert all(
        resumed.losses["subject"][step] == whole.losses["subject"][step] for step in range(4, STEPS + 1)
    )
    adapter, wanted = resumed.adapters["subject"], whole.adapters["subject"]
    assert all(torch.equal(adapter[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(("stages", "budget"), [(1, 10_000), (2, 40)])
def test_an_evaluation_weighs_loss_and_accuracy(base: Base, rows: Rows, stages: int, budget: int) -> None:
    """With a learning rate of next to nothing the adapter is the base model."""
    held_out = weighted(rows(9, 99))
    training = TRAINING.model_copy(update={"learning_rate": 1e-30})
    run = Task("subject", LORA, training, rows(12, 1), 2).prepared()
    assert run.prepared is not None
    evaluation = EvaluationRows(Evaluation(every_steps=2), [row.tokens for row in held_out])
    run.prepared = replace(run.prepared, evaluation=evaluation)
    pipeline = ThreadedPipeline(engines_of(base, stages), {"subject": run}, budget=budget).run()
    assert pipeline.error is None
    loss = correct = count = 0.0
    for row in held_out:
        with torch.no_grad():
            logits = base.model(torch.tensor(row.ids)[None]).logits[0].double()
        labels = torch.tensor(row.labels)
        loss += row.weight * float(cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum"))
        correct += row.weight * float(((logits.argmax(1) == labels) & (labels != IGNORED)).sum())
        count += row.weight * row.supervised
    record = pipeline.tasks["subject"].progress.evaluated.last
    assert record is not None
    assert record.loss == pytest.approx(loss / count, rel=1e-5)
    assert record.token_accuracy == pytest.approx(correct / count)
    assert record.tokens == sum(row.supervised for row in held_out)


def test_what_travels_without_weights_has_none(base: Base, rows: Rows) -> None:
    pipeline = ThreadedPipeline(engines_of(base, 1), {"subject": subject(rows(25, 1)).prepared()}).run()
    segments = [one for item in pipeline.items if isinstance(item, Train) for one in item.segments]
    assert {segment.row_weights for segment in segments} == {None}
