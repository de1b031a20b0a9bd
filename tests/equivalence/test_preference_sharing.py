"""Pairs beside anybody: neighbours, stages, microbatches and interruptions change nothing, and the reference counts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from mlora_worker.coordinator.task.evaluation import EvaluationRows
from mlora_worker.coordinator.task.prepared import InitialState
from mlora_worker.coordinator.task.run import TaskRun
from mlora_worker.data.training_rows.reference_files import ReferenceFiles
from mlora_worker.protocol import Evaluation, LoRAConfig, Objective, Schedule, TaskPhase, Training
from mlora_worker.stream.items import Evaluate, Train
from tests.equivalence.tasks import (
    IGNORED,
    VOCABULARY,
    Base,
    Row,
    Task,
    assert_same,
    engines_of,
    largest_difference,
    pair_of,
    random_pairs,
    train,
)
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.threaded import Crashed, ThreadedPipeline

STEPS = 15
LORA = LoRAConfig(rank=4, alpha=8, dropout=0.1, target_modules=("q_proj", "v_proj", "down_proj"))
DPO = Objective.model_validate({"type": "dpo"})
TRAINING = Training(
    batch_size=2, gradient_accumulation_steps=2, learning_rate=5e-3, schedule=Schedule.COSINE, warmup_steps=3,
    seed=11, checkpoint_every_steps=3, objective=DPO,
)  # fmt: skip
Rows = Callable[..., list[Row]]


def pairs(name: str = "subject", objective: dict[str, Any] | None = None, seed: int = 1) -> Task:
    kind = DPO if objective is None else Objective.model_validate(objective)
    return Task(name, LORA, TRAINING.model_copy(update={"objective": kind}), random_pairs(22, seed), STEPS)


def answers(rows: Rows) -> Task:
    training = TRAINING.model_copy(update={"objective": None, "batch_size": 3})
    return Task("answers", LORA, training, rows(25, 9), STEPS)


def asked(pipeline: ThreadedPipeline) -> list[Evaluate]:
    """Forwards for a reference."""
    return [item for item in pipeline.items if isinstance(item, Evaluate) and item.reference is not None]


def finished(pipeline: ThreadedPipeline) -> ThreadedPipeline:
    if pipeline.error is not None:
        raise pipeline.error
    for run in pipeline.tasks.values():
        assert run.phase is TaskPhase.SUCCEEDED, run.failure
    return pipeline


@pytest.mark.parametrize(("stages", "budget"), [(1, 10_000), (1, 60), (2, 120), (3, 60)])
def test_neighbours_stages_and_microbatches_change_nothing(
    base: Base, rows: Rows, stages: int, budget: int
) -> None:
    company = [
        answers(rows),
        pairs("orpo", {"type": "orpo"}, seed=2),
        pairs("cpo", {"type": "cpo"}, seed=3),
    ]
    alone = {task.name: train(base, 1, [task])[task.name] for task in (pairs(), *company)}
    together = train(base, stages, [company[0], pairs(), *company[1:]], budget=budget)
    for name, wanted in alone.items():
        assert_same(together[name], wanted, losses=1e-6, weights=1e-5)


def crashed_and_whole(
    base: Base, stages: int, subject: Callable[[], TaskRun]
) -> tuple[ThreadedPipeline, ThreadedPipeline]:
    """One that crashed after step 11, resumed from its checkpoint and ended with the bits of the other, which did not."""

    def crash(pipeline: ThreadedPipeline) -> None:
        run = pipeline.tasks["subject"]
        if run.progress.step >= 11 and run.checkpoint.stored_step >= 9:
            pipeline.crash()

    def play(script: Callable[[ThreadedPipeline], None] | None, store: MemoryStore) -> ThreadedPipeline:
        runs = {"subject": subject()}
        return ThreadedPipeline(engines_of(base, stages), runs, store=store, script=script).run(30)

    whole, store = finished(play(None, MemoryStore())), MemoryStore()
    assert isinstance(play(crash, store).error, Crashed)
    resumed = finished(play(None, store))
    first = resumed.tasks["subject"].checkpoint.resumed_step
    assert first is not None
    assert first >= 9
    wanted = whole.adapters["subject"]
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in resumed.adapters["subject"].items())
    return resumed, whole


@pytest.mark.parametrize("stages", [1, 2])
def test_a_task_that_crashed_goes_on_bit_for_bit(base: Base, stages: int) -> None:
    """In the second epoch, whose steps have other rows beside each other than the first one's."""
    resumed, whole = crashed_and_whole(base, stages, lambda: pairs().prepared())
    first = resumed.tasks["subject"].checkpoint.resumed_step
    assert first is not None
    for step in range(first + 1, STEPS + 1):
        assert resumed.losses["subject"][step] == whole.losses["subject"][step]


def test_each_row_is_asked_for_once_whoever_trains_on_it(base: Base) -> None:
    """Three tasks with the same rows, three epochs each; a fourth with other rows."""
    same = [pairs(f"trial-{beta}", {"type": "dpo", "beta": beta}) for beta in (0.1, 0.3, 0.5)]
    runs = {task.name: task.prepared() for task in (*same, pairs("other", seed=5))}
    pipeline = finished(ThreadedPipeline(engines_of(base, 2), runs).run())
    assert sum(len(item.lengths) for item in asked(pipeline)) == 2 * (22 + 22)


def test_a_trial_that_comes_later_finds_what_is_known(base: Base) -> None:
    """The first has ended and is gone."""
    trials = [pairs(f"trial-{beta}", {"type": "dpo", "beta": beta}) for beta in (0.1, 0.5)]
    first, second = (task.prepared() for task in trials)
    second.plan = second.plan.model_copy(update={"admitted": False})

    def then(_: ThreadedPipeline) -> None:
        if first.finished and not first.in_stream:
            first.references = None
            second.plan = second.plan.model_copy(update={"admitted": True})

    runs = {"trial-0.1": first, "trial-0.5": second}
    pipeline = finished(ThreadedPipeline(engines_of(base, 1), runs, script=then).run())
    assert sum(len(item.lengths) for item in asked(pipeline)) == 2 * 22


def test_a_restarted_worker_finds_on_its_disk_what_is_known(base: Base, tmp_path: Path) -> None:
    def play() -> ThreadedPipeline:
        runs = {"subject": pairs().prepared()}
        files = ReferenceFiles(tmp_path, "base")
        return finished(ThreadedPipeline(engines_of(base, 1), runs, references=files).run())

    first, second = play(), play()
    assert sum(len(item.lengths) for item in asked(first)) == 2 * 22
    assert asked(second) == []
    assert first.losses == second.losses


def test_rows_beyond_the_last_step_are_never_asked_for(base: Base) -> None:
    task = Task("few", LORA, TRAINING, random_pairs(60, 1), 3)
    pipeline = finished(ThreadedPipeline(engines_of(base, 1), {"few": task.prepared()}).run())
    assert sum(len(item.lengths) for item in asked(pipeline)) == 2 * 3 * 4


def test_objectives_without_a_reference_ask_for_none(base: Base) -> None:
    runs = {kind: pairs(kind, {"type": kind}).prepared() for kind in ("orpo", "cpo", "simpo")}
    assert not asked(finished(ThreadedPipeline(engines_of(base, 1), runs).run()))


def logps(model: Any, row: Row) -> tuple[float, float]:
    """By transformers, sequence by sequence."""
    found = []
    for own in (slice(0, row.split), slice(row.split, None)):
        with torch.no_grad():
            logits = model(torch.tensor(row.ids[own])[None]).logits[0].double()
        labels = torch.tensor(row.labels[own])
        found.append(-float(cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")))
    return found[0], found[1]


@pytest.mark.parametrize("stages", [1, 3])
def test_the_reference_is_the_base_without_the_adapter(base: Base, stages: int) -> None:
    """Long after the adapter has begun to differ from it."""
    task = pairs()
    pipeline = finished(ThreadedPipeline(engines_of(base, stages), {"subject": task.prepared()}).run())
    references = pipeline.tasks["subject"].references
    assert references is not None
    assert references.train.complete
    for row, values in zip(task.rows, references.train.values.tolist(), strict=True):
        assert values == pytest.approx(logps(base.model, row), rel=1e-5)
    last = [segment for item in pipeline.items if isinstance(item, Train) for segment in item.segments][-1]
    assert last.pairs is not None
    assert last.pairs.reference is not None


def started_from(start: dict[str, torch.Tensor], evaluated: bool = False) -> TaskRun:
    """A task that goes on from another adapter, which has all its tensors on one stage."""
    run = pairs().prepared()
    assert run.prepared is not None
    evaluation = None
    if evaluated:
        rows = [row.tokens for row in random_pairs(5, 77)]
        evaluation = EvaluationRows(Evaluation(every_steps=5), rows, DPO)
    run.prepared = replace(
        run.prepared, initial=InitialState(start, {}), reference_sha256="0" * 64, evaluation=evaluation
    )
    return run


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_task_that_goes_on_from_an_adapter_is_compared_with_that(base: Base, interrupted: bool) -> None:
    start = train(base, 1, [replace(pairs("former", seed=8), steps=6)])["former"].adapter
    store = MemoryStore()

    def crash(pipeline: ThreadedPipeline) -> None:
        run = pipeline.tasks["subject"]
        if interrupted and run.progress.step >= 7 and run.checkpoint.stored_step >= 6:
            pipeline.crash()

    def play(script: Callable[[ThreadedPipeline], None] | None) -> ThreadedPipeline:
        runs = {"subject": started_from(start, evaluated=True)}
        return ThreadedPipeline(engines_of(base, 1), runs, store=store, script=script).run(30)

    pipeline = play(crash)
    if interrupted:
        assert isinstance(pipeline.error, Crashed)
        pipeline = play(None)
        assert pipeline.tasks["subject"].checkpoint.resumed_step == 6
    finished(pipeline)
    references = pipeline.tasks["subject"].references
    assert references is not None
    merged = with_adapter(base, LORA, start)
    for row, values in zip(pairs().rows, references.train.values.tolist(), strict=True):
        assert values == pytest.approx(logps(merged, row), rel=1e-5)
    if not interrupted:  # at the first step both are the same: a margin of zero
        assert pipeline.losses["subject"][1] == pytest.approx(0.693147, rel=1e-2)  # dropout


def with_adapter(base: Base, lora: LoRAConfig, adapter: dict[str, torch.Tensor]) -> Any:
    model = copy.deepcopy(base.model)
    for name in adapter:
        if "lora_A" in name:
            path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            delta = adapter[name.replace("lora_A", "lora_B")] @ adapter[name]
            model.get_submodule(path).weight.data += delta * (lora.alpha / lora.rank)
    return model


def test_an_evaluation_of_pairs_says_what_training_would(base: Base) -> None:
    """With a learning rate of next to nothing each margin is zero, so that nothing is preferred yet."""
    task = replace(pairs(), training=TRAINING.model_copy(update={"learning_rate": 1e-30}), steps=2)
    run = task.prepared()
    assert run.prepared is not None
    held_out = random_pairs(7, 99)
    evaluation = EvaluationRows(Evaluation(every_steps=2), [row.tokens for row in held_out], DPO)
    run.prepared = replace(run.prepared, evaluation=evaluation)
    pipeline = finished(ThreadedPipeline(engines_of(base, 2), {"subject": run}, budget=80).run())
    record = pipeline.tasks["subject"].progress.evaluated.last
    assert record is not None
    assert record.preference is not None
    wanted = [logps(base.model, row) for row in held_out]
    assert record.loss == pytest.approx(0.693147, rel=1e-5)
    assert record.preference.chosen_logps == pytest.approx(sum(one for one, _ in wanted) / 7, rel=1e-5)
    assert record.preference.rejected_logps == pytest.approx(sum(one for _, one in wanted) / 7, rel=1e-5)
    assert record.preference.margin == pytest.approx(0, abs=1e-6)


def test_token_accuracy_is_that_of_the_chosen_answers(base: Base) -> None:
    """Which are what the base says itself in two rows of three; the rejected ones never are."""
    task = replace(pairs(), training=TRAINING.model_copy(update={"learning_rate": 1e-30}), steps=2)

    def said(prompt: list[int], length: int = 6) -> list[int]:
        ids = list(prompt)
        for _ in range(length):
            with torch.no_grad():
                ids.append(int(base.model(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(prompt) :]

    def others(answer: list[int]) -> list[int]:
        return [(token + 1) % VOCABULARY for token in answer]

    prompts = [[5, 9, 2], [7, 1, 1, 3], [8, 8, 4]]
    held_out = [pair_of(prompt, said(prompt), others(said(prompt))) for prompt in prompts[:2]]
    held_out.append(pair_of(prompts[2], [(said(prompts[2], 1)[0] + 1) % VOCABULARY] * 6, said(prompts[2])))
    run = task.prepared()
    assert run.prepared is not None
    evaluation = EvaluationRows(Evaluation(every_steps=2), [row.tokens for row in held_out], DPO)
    run.prepared = replace(run.prepared, evaluation=evaluation)
    pipeline = finished(ThreadedPipeline(engines_of(base, 2), {"subject": run}, budget=80).run())
    record = pipeline.tasks["subject"].progress.evaluated.last
    assert record is not None
    last = held_out[2].ids[: held_out[2].split]
    greedy = base.model(torch.tensor([last])).logits[0, 2:-1].argmax(dim=1).tolist()
    right = 12 + sum(one == token for one, token in zip(greedy, last[3:], strict=True))
    assert record.token_accuracy == pytest.approx(right / 18)


def test_weights_of_pairs_count_as_if_rows_came_that_often(base: Base) -> None:
    rows = random_pairs(4, 3)
    heavy = [replace(row, weight=weight) for row, weight in zip(rows, (1.0, 2.0, 1.0, 1.0), strict=True)]
    lora = LORA.model_copy(update={"dropout": 0.0})
    for kind in ({"type": "dpo"}, {"type": "orpo"}, {"type": "cpo"}):
        settings = TRAINING.model_copy(
            update={
                "objective": Objective.model_validate(kind),
                "batch_size": 5,
                "gradient_accumulation_steps": 1,
            }
        )
        weighted = Task("weighted", lora, settings, heavy, 6)
        repeated = Task("repeated", lora, settings, [*rows, rows[1]], 6)
        found = train(base, 1, [weighted, repeated])
        assert found["weighted"].losses == pytest.approx(found["repeated"].losses, rel=1e-5)
        assert largest_difference(found["weighted"].adapter, found["repeated"].adapter) < 1e-4
