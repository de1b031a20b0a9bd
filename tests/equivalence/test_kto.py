"""KTO's estimate of the divergence is that of the task's own step: TRL's, whoever trains beside it, however it is cut."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch.nn.functional import cross_entropy

from mlora_worker.coordinator.task.divergence import MismatchedRows
from mlora_worker.coordinator.task.evaluation import EvaluationRows
from mlora_worker.coordinator.task.prepared import InitialState
from mlora_worker.data.training_rows.token_rows import TokenRow
from mlora_worker.pipeline.engine import StageEngine
from mlora_worker.protocol import Evaluation, LoRAConfig, Objective, Schedule, Training
from mlora_worker.stream.items import Evaluate, Train
from tests.equivalence.tasks import (
    IGNORED,
    Base,
    Row,
    Task,
    assert_same,
    engines_of,
    largest_difference,
    random_answers,
    random_pairs,
    start_of,
    train,
)
from tests.equivalence.test_preference_sharing import crashed_and_whole, finished, with_adapter
from tests.equivalence.trl_trainers import train_with_trl
from tests.fixtures.threaded import ThreadedPipeline

STEPS = 15
LORA = LoRAConfig(rank=4, alpha=8, target_modules=("q_proj", "v_proj", "down_proj"))
DROPPING = LORA.model_copy(update={"dropout": 0.1})
KTO = Objective.model_validate({"type": "kto"})
TRAINING = Training(
    batch_size=2, gradient_accumulation_steps=2, learning_rate=5e-3, schedule=Schedule.COSINE, warmup_steps=3,
    seed=11, checkpoint_every_steps=3, objective=KTO,
)  # fmt: skip
Rows = Callable[..., list[Row]]


def answers(name: str = "subject", lora: LoRAConfig = DROPPING, **training: Any) -> Task:
    return Task(name, lora, TRAINING.model_copy(update=training), random_answers(22, 1), STEPS)


def company(rows: Rows) -> list[Task]:
    """Supervised, by DPO, and by KTO without an estimate."""
    dpo, apo = (
        Objective.model_validate(one)
        for one in ({"type": "dpo"}, {"type": "kto", "lossType": "apo_zero_unpaired"})
    )
    return [
        Task(
            "sft", LORA, TRAINING.model_copy(update={"objective": None, "batch_size": 3}), rows(25, 9), STEPS
        ),
        Task("dpo", LORA, TRAINING.model_copy(update={"objective": dpo}), random_pairs(22, 3), STEPS),
        Task("apo", LORA, TRAINING.model_copy(update={"objective": apo}), random_answers(22, 4), STEPS),
    ]


def played(engines: Sequence[StageEngine], tasks: Sequence[Task], **options: Any) -> ThreadedPipeline:
    runs = {task.name: task.prepared() for task in tasks}
    return finished(ThreadedPipeline(engines, runs, **options).run())


def lines_of(pipeline: ThreadedPipeline, name: str = "subject") -> list[dict[str, float]]:
    return [json.loads(line) for line in pipeline.tasks[name].history.lines().splitlines()]


def estimates_of(pipeline: ThreadedPipeline, name: str = "subject") -> dict[int, set[float]]:
    """By step, what its segments were told."""
    found: dict[int, set[float]] = {}
    for item in pipeline.items:
        for segment in item.segments if isinstance(item, Train) else ():
            if segment.task == name:
                assert segment.unpaired is not None
                found.setdefault(segment.step, set()).add(segment.unpaired.kl)
    return found


def forwards_of(pipeline: ThreadedPipeline, name: str = "subject") -> list[Evaluate]:
    return [
        item for item in pipeline.items if isinstance(item, Evaluate) and item.task == name and item.reference
    ]


def test_what_is_reported_of_each_step_is_what_trl_logs(base: Base, tmp_path: Path) -> None:
    subject = answers(lora=LORA, batch_size=6, gradient_accumulation_steps=1, learning_rate=1e-2)
    subject = replace(subject, rows=random_answers(24, 1))  # which make whole steps
    engines = engines_of(base, 1)
    start = start_of(engines, subject)
    ours = lines_of(played(engines, [subject]))
    theirs = [
        log
        for log in train_with_trl(base, subject, start, tmp_path).logs
        if "rewards/chosen" in log or "kl" in log
    ]
    assert len(ours) == len(theirs) == STEPS
    names = {
        "chosenReward": "rewards/chosen",
        "rejectedReward": "rewards/rejected",
        "margin": "rewards/margins",
    }
    names |= {"chosenLogps": "logps/chosen", "rejectedLogps": "logps/rejected", "kl": "kl"}
    for one, other in zip(ours, theirs, strict=True):
        for name, log in names.items():
            assert (name in one) == (log in other)
            assert one.get(name, 0.0) == pytest.approx(other.get(log, 0.0), rel=1e-3, abs=2e-4)
    assert sum(one["kl"] > 0.01 for one in ours) > STEPS / 5


@pytest.mark.parametrize(("stages", "budget"), [(1, 10_000), (1, 60), (2, 120), (3, 60)])
def test_neighbours_stages_and_microbatches_change_nothing(
    base: Base, rows: Rows, stages: int, budget: int
) -> None:
    others = company(rows)
    alone = {task.name: train(base, 1, [task])[task.name] for task in (answers(), *others)}
    together = train(base, stages, [others[0], answers(), *others[1:]], budget=budget)
    for name, wanted in alone.items():
        assert_same(together[name], wanted, losses=1e-6, weights=1e-5)


def test_alone_and_beside_neighbours_in_its_microbatches_are_the_same_bits(base: Base, rows: Rows) -> None:
    others = company(rows)
    alone = played(engines_of(base, 1), [answers()])
    beside = played(engines_of(base, 1), [others[0], answers(), *others[1:]])
    assert any(
        len(train.segments) > 1 for step in beside.microbatches_of("subject").values() for train in step
    )
    assert estimates_of(alone) == estimates_of(beside)
    assert alone.losses["subject"] == beside.losses["subject"]
    wanted = alone.adapters["subject"]
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in beside.adapters["subject"].items())


def test_all_segments_of_a_step_are_told_one_estimate_and_each_row_is_looked_at_twice(base: Base) -> None:
    """By the adapter and by the base; and once more, as it stands, for its own reference."""
    pipeline = played(engines_of(base, 2), [answers()], budget=40)
    assert all(len(told) == 1 for told in estimates_of(pipeline).values())
    assert max(len(trains) for trains in pipeline.microbatches_of("subject").values()) > 2
    of_steps = sum(len(answers().batch(step)) for step in range(1, STEPS + 1))
    asked = dict.fromkeys(("adapter", "base"), 0)
    for item in forwards_of(pipeline):
        assert item.reference is not None
        asked[item.reference] += len(item.lengths)
    assert asked == {"adapter": of_steps, "base": of_steps + 22}


@pytest.mark.parametrize("stages", [1, 2])
def test_a_task_that_crashed_goes_on_bit_for_bit(base: Base, stages: int) -> None:
    resumed, whole = crashed_and_whole(base, stages, lambda: evaluated(answers()))
    assert lines_of(resumed) == lines_of(whole)


HELD_OUT = random_answers(9, 77)


def evaluated(task: Task) -> Any:
    run = task.prepared()
    assert run.prepared is not None
    rows = [row.tokens for row in HELD_OUT]
    longest = task.training.max_seq_length
    evaluation = EvaluationRows(Evaluation(every_steps=5), rows, task.training.preference, longest)
    run.prepared = replace(run.prepared, evaluation=evaluation)
    return run


@pytest.mark.parametrize(("stages", "budget"), [(1, 10_000), (2, 50)])
def test_an_evaluation_is_that_of_its_own_rows(base: Base, stages: int, budget: int) -> None:
    """By transformers, with the trained adapter merged: all of its rows together, and their own estimate."""
    task = answers(learning_rate=2e-2)
    pipeline = ThreadedPipeline(engines_of(base, stages), {"subject": evaluated(task)}, budget=budget).run()
    record = finished(pipeline).tasks["subject"].progress.evaluated.last
    assert record is not None
    assert record.step == STEPS
    assert record.preference is not None
    trained = with_adapter(base, task.lora, pipeline.adapters["subject"])
    own = [row.tokens for row in HELD_OUT]
    ratios = torch.tensor([logp(trained, row) - logp(base.model, row) for row in own])
    wrong = [logp(trained, row) - logp(base.model, row) for row in MismatchedRows(own, 512)]
    kl = max(0.0, sum(wrong) / len(wrong))
    assert record.preference.kl == pytest.approx(kl, rel=1e-4, abs=1e-6)
    desirable = torch.tensor([bool(row.desirable) for row in HELD_OUT])
    losses = torch.where(desirable, torch.sigmoid(-0.1 * (ratios - kl)), torch.sigmoid(0.1 * (ratios - kl)))
    assert record.loss == pytest.approx(float(losses.mean()), rel=1e-5)
    assert record.preference.chosen_reward == pytest.approx(0.1 * float(ratios[desirable].mean()), rel=1e-4)
    assert record.preference.rejected_reward == pytest.approx(
        0.1 * float(ratios[~desirable].mean()), rel=1e-4
    )
    assert record.preference.accuracy is None


def test_the_reference_of_an_evaluations_estimate_is_looked_at_once(base: Base) -> None:
    one, two = (
        ThreadedPipeline(engines_of(base, 1), {"subject": run}).run()
        for run in (answers().prepared(), evaluated(answers()))
    )
    asked = [
        sum(len(item.lengths) for item in forwards_of(p) if item.reference == "base") for p in (one, two)
    ]
    # Its rows as they stand, and mismatched; of three evaluations.
    assert asked[1] - asked[0] == 2 * len(HELD_OUT)


def logp(model: Any, row: TokenRow) -> float:
    """Of the answer, by transformers."""
    with torch.no_grad():
        logits = model(torch.tensor(row.ids, dtype=torch.int64)[None]).logits[0].double()
    labels = torch.tensor(row.labels, dtype=torch.int64)
    return -float(cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum"))


def test_mismatched_rows_that_are_too_long_are_cut_as_by_trl(base: Base, tmp_path: Path) -> None:
    longest = 15
    some = [row for row in random_answers(60, 5) if len(row.ids) <= longest][:20]
    subject = replace(
        answers(
            lora=LORA, batch_size=4, gradient_accumulation_steps=1, max_seq_length=longest, learning_rate=1e-2
        ),
        rows=some,
    )
    steps = ([row.tokens for row in subject.batch(step)] for step in range(1, STEPS + 1))
    assert max(max(MismatchedRows(own, 512).lengths) for own in steps) > longest
    ours = train(base, 1, [subject])["subject"]
    assert_same(ours, train_with_trl(base, subject, ours.start, tmp_path), losses=1e-4, weights=1e-4)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_task_that_goes_on_from_an_adapter_is_compared_with_that(base: Base, stages: int) -> None:
    """Without an estimate, which would have to ask it in each step."""
    apo = Objective.model_validate({"type": "kto", "lossType": "apo_zero_unpaired"})
    start = train(base, 1, [replace(answers("former"), steps=6)])["former"].adapter
    task = answers(lora=LORA, objective=apo)
    run = task.prepared()
    assert run.prepared is not None
    engines = engines_of(base, stages)
    parts = [
        {name: tensor for name, tensor in start.items() if name in engine_names(one, task)} for one in engines
    ]
    payloads = {stage: save(part) for stage, part in enumerate(parts) if stage}
    run.prepared = replace(run.prepared, initial=InitialState(parts[0], payloads), reference_sha256="0" * 64)
    pipeline = finished(ThreadedPipeline(engines, {"subject": run}).run())
    references = pipeline.tasks["subject"].references
    assert references is not None
    merged = with_adapter(base, LORA, start)
    wanted = [logp(merged, row.tokens) for row in task.rows]
    assert references.train.values[:, 0].tolist() == pytest.approx(wanted, rel=1e-5)
    assert pipeline.losses["subject"][1] == pytest.approx(0.5, rel=1e-6)


def engine_names(engine: StageEngine, task: Task) -> set[str]:
    """Of its part of the adapter."""
    engine.load(task.load)
    names = set(engine.export(task.name))
    engine.unload(task.name)
    return names


def test_weights_of_answers_count_as_if_rows_came_that_often(base: Base) -> None:
    apo = Objective.model_validate({"type": "kto", "lossType": "apo_zero_unpaired", "desirableWeight": 1.5})
    some = random_answers(4, 3)
    heavy = [replace(row, weight=weight) for row, weight in zip(some, (1.0, 2.0, 1.0, 1.0), strict=True)]
    settings = TRAINING.model_copy(
        update={"objective": apo, "batch_size": 5, "gradient_accumulation_steps": 1}
    )
    weighted = Task("weighted", LORA, settings, heavy, 6)
    repeated = Task("repeated", LORA, settings, [*some, some[1]], 6)
    found = train(base, 1, [weighted, repeated])
    assert found["weighted"].losses == pytest.approx(found["repeated"].losses, rel=1e-5)
    assert largest_difference(found["weighted"].adapter, found["repeated"].adapter) < 1e-4
