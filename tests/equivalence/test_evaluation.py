"""Evaluation in the stream: right numbers, no trace in anybody's training, and the same end after an interruption."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from mlora_worker.coordinator.task.evaluation import EvaluationRows
from mlora_worker.coordinator.task.run import TaskRun
from mlora_worker.data.prepare import TokenRow
from mlora_worker.protocol import EarlyStopping, Evaluation, LoRAConfig, Schedule, TaskPhase, Training
from mlora_worker.stream.items import Evaluate, Keep, Train
from tests.equivalence.tasks import IGNORED, Base, Row, Task, engines_of, largest_difference
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.threaded import Crashed, ThreadedPipeline

LORA = LoRAConfig(rank=4, alpha=8, dropout=0.1, target_modules=("q_proj", "v_proj", "down_proj"))
TRAINING = Training(
    batch_size=3, learning_rate=2e-2, schedule=Schedule.CONSTANT, seed=5, checkpoint_every_steps=2
)
STEPS = 8
Rows = Callable[..., list[Row]]


def run_of(task: Task, evaluation: Evaluation | None, held_out: Sequence[Row]) -> TaskRun:
    run = task.prepared()
    if evaluation is not None:
        rows = [TokenRow(np.array(row.ids, np.int32), np.array(row.labels, np.int32)) for row in held_out]
        assert run.prepared is not None
        run.prepared = replace(run.prepared, evaluation=EvaluationRows(evaluation, rows))
    return run


def trained(base: Base, stages: int, runs: Mapping[str, TaskRun], **options: object) -> ThreadedPipeline:
    pipeline = ThreadedPipeline(engines_of(base, stages), runs, **options).run()  # type: ignore[arg-type]
    if pipeline.error is not None:
        raise pipeline.error
    return pipeline


def by_hand(
    base: Base, lora: LoRAConfig, adapter: Mapping[str, Tensor], rows: Sequence[Row]
) -> tuple[float, float]:
    """Loss and accuracy of the base with ``adapter`` merged into it, row by row, by transformers."""
    model = base.model
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name in adapter:
        if "lora_A" in name:
            path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            delta = adapter[name.replace("lora_A", "lora_B")] @ adapter[name]
            model.get_submodule(path).weight.data += delta * (lora.alpha / lora.rank)
    loss = correct = count = 0.0
    with torch.no_grad():
        for row in rows:
            logits = model(torch.tensor(row.ids)[None]).logits[0].double()
            labels = torch.tensor(row.labels)
            loss += float(cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum"))
            correct += float(((logits.argmax(1) == labels) & (labels != IGNORED)).sum())
            count += float((labels != IGNORED).sum())
    model.load_state_dict(kept)
    return loss / count, correct / count


@pytest.mark.parametrize(("stages", "budget"), [(1, 10_000), (2, 40), (3, 40)])
def test_loss_and_accuracy_are_those_of_transformers_without_dropout(
    base: Base, rows: Rows, stages: int, budget: int
) -> None:
    held_out = rows(7, 99)
    task = Task("a", LORA, TRAINING, rows(12, 1), STEPS)
    pipeline = trained(
        base, stages, {"a": run_of(task, Evaluation(every_steps=STEPS), held_out)}, budget=budget
    )
    record = pipeline.tasks["a"].progress.evaluated.last
    assert record is not None
    loss, accuracy = by_hand(base, LORA, pipeline.adapters["a"], held_out)
    assert record.step == STEPS
    assert record.loss == pytest.approx(loss, rel=1e-5)
    assert record.token_accuracy == pytest.approx(accuracy)
    assert record.tokens == sum(label != IGNORED for row in held_out for label in row.labels)
    microbatches = sum(isinstance(item, Evaluate) for item in pipeline.items)
    assert microbatches == 1 if budget > 1000 else microbatches >= 3


@pytest.mark.parametrize("stages", [1, 2])
def test_neither_the_task_nor_its_neighbour_is_trained_otherwise_than_without_evaluation(
    base: Base, rows: Rows, stages: int
) -> None:
    task, neighbour = (
        Task("a", LORA, TRAINING, rows(12, 1), STEPS),
        Task("b", LORA, TRAINING, rows(12, 2), STEPS),
    )

    def both(evaluation: Evaluation | None) -> ThreadedPipeline:
        runs = {"a": run_of(task, evaluation, rows(9, 99)), "b": neighbour.prepared()}
        return trained(base, stages, runs, budget=40)

    plain, evaluated = both(None), both(Evaluation(every_steps=2, keep_best=False))
    for name in ("a", "b"):
        assert evaluated.losses[name] == pytest.approx(plain.losses[name], rel=1e-5)
        assert largest_difference(evaluated.adapters[name], plain.adapters[name]) < 1e-4
    assert len(evaluations_of(evaluated.tasks["a"])) == STEPS / 2
    assert sum(isinstance(item, Evaluate) for item in evaluated.items) >= 4 * 3


def test_a_neighbours_microbatches_go_between_those_of_an_evaluation(base: Base, rows: Rows) -> None:
    task, neighbour = Task("a", LORA, TRAINING, rows(3, 1), 1), Task("b", LORA, TRAINING, rows(60, 2), 20)
    runs = {"a": run_of(task, Evaluation(every_steps=1), rows(20, 99)), "b": neighbour.prepared()}
    pipeline = trained(base, 2, runs, budget=30)
    kinds = [type(item) for item in pipeline.items if isinstance(item, Evaluate | Train)]
    evaluations = kinds.count(Evaluate)
    assert evaluations >= 10
    first, last = kinds.index(Evaluate), len(kinds) - 1 - kinds[::-1].index(Evaluate)
    assert kinds[first:last].count(Train) >= evaluations // 3


def rising(rows: Rows) -> tuple[Task, list[Row]]:
    """A rate so high, on few rows, that what was not trained on gets worse soon."""
    return Task("a", LORA, TRAINING, rows(6, 1), 40), rows(6, 99)


STOPPING = Evaluation(every_steps=2, early_stopping=EarlyStopping(patience=2), keep_best=True)


@pytest.fixture(scope="module")
def stopped(base: Base, rows: Rows) -> ThreadedPipeline:
    task, held_out = rising(rows)
    return trained(base, 2, {"a": run_of(task, STOPPING, held_out)})


def evaluations_of(run: TaskRun) -> dict[int, float]:
    lines = [json.loads(line) for line in run.history.lines().splitlines()]
    return {line["step"]: line["evaluationLoss"] for line in lines if "evaluationLoss" in line}


def test_it_stops_when_the_loss_improves_no_more_and_the_best_adapter_is_published(
    base: Base, rows: Rows, stopped: ThreadedPipeline
) -> None:
    task, held_out = rising(rows)
    run = stopped.tasks["a"]
    losses = evaluations_of(run)
    best = run.progress.evaluated.best
    assert best is not None
    assert run.phase is TaskPhase.SUCCEEDED
    assert run.progress.step < task.steps, "the case is none: it never stopped"
    assert best.loss == min(losses.values())
    assert list(losses) == list(range(2, run.progress.step + 1, 2))
    assert run.progress.step == best.step + 2 * 2
    assert by_hand(base, LORA, stopped.adapters["a"], held_out)[0] == pytest.approx(best.loss, rel=1e-5)
    outcome = run.outcome()
    assert (outcome.step, outcome.evaluation) == (best.step, best)


def test_the_kept_adapter_is_the_one_that_training_to_that_step_gives(
    base: Base, rows: Rows, stopped: ThreadedPipeline
) -> None:
    task, _ = rising(rows)
    best = stopped.tasks["a"].progress.evaluated.best
    assert best is not None
    until = trained(base, 1, {"a": replace(task, steps=best.step).prepared()})
    assert largest_difference(stopped.adapters["a"], until.adapters["a"]) < 1e-4


@pytest.mark.parametrize("crash_at", [2, 4, 5])
def test_a_crash_changes_neither_where_it_stops_nor_what_is_published_nor_the_history(
    base: Base, rows: Rows, stopped: ThreadedPipeline, crash_at: int
) -> None:
    task, held_out = rising(rows)
    store = MemoryStore()

    def crash(pipeline: ThreadedPipeline) -> None:
        run = pipeline.tasks["a"]
        if run.progress.step >= crash_at and run.checkpoint.stored_step:
            pipeline.crash()

    first = ThreadedPipeline(
        engines_of(base, 2), {"a": run_of(task, STOPPING, held_out)}, store=store, script=crash
    ).run()
    assert isinstance(first.error, Crashed)
    again = trained(base, 1, {"a": run_of(task, STOPPING, held_out)}, store=store)
    run, wanted = again.tasks["a"], stopped.tasks["a"]
    assert run.checkpoint.resumed_step
    assert run.progress.step == wanted.progress.step
    assert evaluations_of(run) == pytest.approx(evaluations_of(wanted), rel=1e-4)
    assert len(run.history.lines().splitlines()) == len(wanted.history.lines().splitlines())
    assert largest_difference(again.adapters["a"], stopped.adapters["a"]) < 1e-3


def test_a_task_that_is_preempted_while_it_is_evaluated_is_evaluated_again_and_keeps_its_best(
    base: Base, rows: Rows, stopped: ThreadedPipeline
) -> None:
    """It leaves at the moment at which the result is there and the stages have not been asked for the best adapter."""
    task, held_out = rising(rows)
    seen: set[int] = set()

    def preempt(pipeline: ThreadedPipeline) -> None:
        run = pipeline.tasks["a"]
        busy = run.flight.assessment is not None or run.flight.keep_is_due
        out = busy and run.in_stream and run.progress.step not in seen
        if out:
            seen.add(run.progress.step)
        if out or (not run.plan.admitted and run.phase is TaskPhase.PREEMPTED):
            run.plan = run.plan.model_copy(update={"admitted": not out})

    pipeline = trained(base, 2, {"a": run_of(task, STOPPING, held_out)}, budget=40, script=preempt)
    assert len(seen) > 2
    run = pipeline.tasks["a"]
    assert run.progress.step == stopped.tasks["a"].progress.step
    assert evaluations_of(run) == pytest.approx(evaluations_of(stopped.tasks["a"]), rel=1e-4)
    assert largest_difference(pipeline.adapters["a"], stopped.adapters["a"]) < 1e-3
    assert any(isinstance(item, Keep) for item in pipeline.items)


def test_an_evaluation_whose_loss_is_no_number_fails_the_task_alone(base: Base, rows: Rows) -> None:
    task, neighbour = Task("a", LORA, TRAINING, rows(6, 1), 4), Task("b", LORA, TRAINING, rows(6, 2), 4)
    runs = {"a": run_of(task, Evaluation(every_steps=2), rows(6, 99)), "b": neighbour.prepared()}

    def poison(pipeline: ThreadedPipeline) -> None:  # between two of its microbatches
        assessment = pipeline.tasks["a"].flight.assessment
        if assessment is not None:
            assessment.loss_sum = math.nan

    pipeline = trained(base, 1, runs, budget=40, script=poison)
    failure = pipeline.tasks["a"].failure
    assert failure is not None
    assert failure.reason == "NonFiniteLoss"
    assert "the evaluation after step 2 of 4" in failure.message
    assert pipeline.tasks["b"].phase is TaskPhase.SUCCEEDED
