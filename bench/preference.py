"""``python -m bench preference``: four DPO tasks of two pairs a step, against TRL's DPOTrainer with PEFT.

This project trains all tasks in shared packed microbatches; TRL one after the other. Each repetition is two steps of every
task on the same rows and from the same adapters on both sides, whose losses are compared. Twice: with the reference's
log-probabilities known on both sides (``vs_trl``), and on neither (``vs_trl_computed``): then both look at the reference
for each row. TRL trains without gradient checkpointing, which would cost it more.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from bench.base import cut_folder, smollm2_folder, transformers_model, whole_stage
from bench.options import parser, repetitions
from bench.ours import BUDGET
from bench.report import last_line, table
from bench.rows import gsm8k_rows, pack, shortest
from bench.sides import MAX_GRAD_NORM, Setting, check_losses, in_turns, seconds
from mlora_worker.coordinator.dispatch.issuing import lengths_of
from mlora_worker.data.prepare import TokenRow
from mlora_worker.data.tokenizing.tokenizer import load_tokenizer
from mlora_worker.model.stage import Stage
from mlora_worker.pipeline.engine import StageEngine
from mlora_worker.protocol import Objective, Training
from mlora_worker.stream.items import Evaluate, Load, Pairs, Segment, Train, Unload, Update
from mlora_worker.stream.rule import IssueRule

if TYPE_CHECKING:  # who trains here alone needs no TRL
    from bench.peers.trl_preference import TrlTask

TASKS, BATCH, STEPS = 4, 2, 2
BETA, LEARNING_RATE, TOLERANCE = 0.1, 1e-3, 1e-3
OBJECTIVE = Objective.model_validate({"type": "dpo", "beta": BETA})
QUICK_LAYERS, QUICK_ROWS = 2, 24
USUAL, LONG = 2, 5

Tasks = Sequence[Sequence[TokenRow]]  # of each task, the pairs of all its steps


class Ours:
    """All tasks through one engine that holds the whole model."""

    def __init__(self, stage: Stage, setting: Setting) -> None:
        self.engine = StageEngine(stage)
        self._names = [f"task-{number}" for number in range(setting.tasks)]
        self._setting = setting
        self._number = 0

    def begin(self) -> list[dict[str, Tensor]]:
        """With fresh adapters, which it returns by PEFT's names."""
        for seed, name in enumerate(self._names):
            self.engine.unload(Unload(number=0, task=name).task)
            training = Training(seed=seed, objective=OBJECTIVE)
            self.engine.load(Load(number=0, task=name, lora=self._setting.lora, training=training))
        return [self.engine.export(name) for name in self._names]

    def refer(self, rows: Sequence[TokenRow]) -> list[float]:
        """Log-probabilities of two answers of each pair under the base."""
        packed = pack(rows)
        item = Evaluate(number=self._next(), task=self._names[0], lengths=packed.lengths, reference="base")
        found = self.engine.evaluate(item, token_ids=packed.ids, hidden=None, labels=packed.targets)
        assert found.scores is not None
        values: list[float] = found.scores.tolist()
        return values

    def train(self, tasks: Tasks, references: Sequence[Sequence[float]] | None) -> list[list[float]]:
        """Loss of each step of each task. ``references``: of all rows of each task; None: they are computed, too."""
        losses: list[list[float]] = [[] for _ in tasks]
        updates: list[Update | None] = [None] * len(tasks)
        for step in range(STEPS):
            some = [rows[step * BATCH : (step + 1) * BATCH] for rows in tasks]
            if references is None:
                known = [self.refer(rows) for rows in some]
            else:
                known = [list(own[2 * step * BATCH : 2 * (step + 1) * BATCH]) for own in references]
            sums, squares = self._step(step + 1, some, known, updates)
            for task, (loss, square) in enumerate(zip(sums, squares, strict=True)):
                losses[task].append(loss / BATCH)
                clip = min(1.0, MAX_GRAD_NORM / (square**0.5 + 1e-6))
                updates[task] = Update(step=step + 1, learning_rate=LEARNING_RATE, clip=clip)
        for name, update in zip(self._names, updates, strict=True):
            assert update is not None
            self.engine.apply(name, update)
        return losses

    def _step(
        self,
        step: int,
        tasks: Tasks,
        references: Sequence[Sequence[float]],
        updates: Sequence[Update | None],
    ) -> tuple[list[float], list[float]]:
        """Of each task, the sum of its losses, and the squared norm of its gradient."""
        rule = IssueRule(1, BUDGET)
        for name, rows in zip(self._names, tasks, strict=True):
            rule.join(name, sum(len(row.ids) for row in rows), len(rows))
        lengths = {
            name: [len(row.ids) for row in rows] for name, rows in zip(self._names, tasks, strict=True)
        }
        sums, squares = [0.0] * len(tasks), [0.0] * len(tasks)
        started: set[str] = set()

        def may_start(name: str) -> bool:
            return name not in started

        while parts := rule.next(lengths.__getitem__, may_start):
            started.update(part.task for part in parts)
            segments, rows, places = [], [], []
            for part in parts:
                task = self._names.index(part.task)
                first, after = part.first_row, part.first_row + len(part.lengths)
                own = tasks[task][first:after]
                segments.append(
                    Segment(
                        task=part.task,
                        step=step,
                        lengths=lengths_of(own),
                        first_row=2 * first,
                        weight=1 / BATCH,
                        pairs=Pairs(reference=tuple(references[task][2 * first : 2 * after])),
                        closes_step=part.closes_step,
                        update=updates[task] if first == 0 else None,
                    )
                )
                rows += own
                places.append(task)
            item, packed = Train(number=self._next(), segments=tuple(segments)), pack(rows)
            out = self.engine.forward(item, token_ids=packed.ids, hidden=None, labels=packed.targets)
            back = self.engine.backward(item.number, None)
            assert out.losses is not None
            for task, loss, square in zip(
                places, out.losses.tolist(), back.squared_norms.tolist(), strict=True
            ):
                sums[task] += loss
                squares[task] += square
            rule.returned([part.task for part in parts])
        return sums, squares

    def _next(self) -> int:
        self._number += 1
        return self._number


def pairs_of(rows: Sequence[TokenRow]) -> list[TokenRow]:
    """Each question with its own answer, and with that of the next question."""
    made = []
    for row, other in zip(rows, [*rows[1:], rows[0]], strict=True):
        prompt, own = answer_of(row)
        _, wrong = answer_of(other)
        ids = [np.concatenate([prompt, answer]) for answer in (own, wrong)]
        labels = [
            np.concatenate([np.full(len(prompt) - 1, -100, np.int32), answer, np.full(1, -100, np.int32)])
            for answer in (own, wrong)
        ]
        made.append(TokenRow(np.concatenate(ids), np.concatenate(labels), 1.0, len(ids[0])))
    return made


def answer_of(row: TokenRow) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    first = 1 + int((row.labels >= 0).argmax())
    return row.ids[:first], row.ids[first:]


@dataclass(frozen=True)
class Measured:
    precomputed: bool
    times: list[dict[str, float]]  # per repetition and side, seconds
    processor: list[dict[str, float]]  # the same of processor time
    tokens: list[int]
    difference: float

    def ratio(self, times: Sequence[Mapping[str, float]]) -> float:
        return statistics.median(one["trl"] / one["ours"] for one in times)

    def as_json(self) -> dict[str, Any]:
        return {
            "reference": "known" if self.precomputed else "computed",
            "tokens": sum(self.tokens),
            "vs_trl": self.ratio(self.times),
            "vs_trl_processor": self.ratio(self.processor),
            "seconds": self.times,
            "loss_difference": self.difference,
        }


def main(arguments: list[str]) -> int:
    made = parser("preference", __doc__)
    made.add_argument(
        "--reference",
        choices=("known", "computed", "both"),
        default="both",
        help="whether its log-probabilities are known before times are taken (default: one after the other)",
    )
    options = made.parse_args(arguments)
    from bench.peers.trl_preference import TrlTask

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    count = repetitions(options, USUAL, LONG)
    with tempfile.TemporaryDirectory() as scratch:
        folder = smollm2_folder()
        if options.quick:
            folder = cut_folder(folder, QUICK_LAYERS, Path(scratch) / "cut")
        rows = gsm8k_rows(folder)
        pairs = pairs_of(shortest(rows, QUICK_ROWS) if options.quick else rows)
        setting = Setting(TASKS, ("all-linear",), dropout=0.0)
        ours = Ours(whole_stage(folder, torch.float32), setting)
        base, tokenizer = transformers_model(folder, torch.float32), load_tokenizer(folder)

        def trl_task(rows: Sequence[TokenRow], adapter: Mapping[str, Tensor], precomputed: bool) -> TrlTask:
            return TrlTask(
                base, tokenizer, setting, rows, adapter, batch=BATCH, beta=BETA, learning_rate=LEARNING_RATE,
                precomputed=precomputed, scratch=Path(scratch),
            )  # fmt: skip

        modes = [mode for mode in ("known", "computed") if options.reference in (mode, "both")]
        results = {mode: measure(ours, trl_task, pairs, count, mode == "known") for mode in modes}
    print(
        table(
            ("reference", "ours s", "TRL s", "ratio", "of processor time"),
            [
                (
                    mode,
                    statistics.median(times["ours"] for times in one.times),
                    statistics.median(times["trl"] for times in one.times),
                    one.ratio(one.times),
                    one.ratio(one.processor),
                )
                for mode, one in results.items()
            ],
        )
    )
    names = {"known": "vs_trl", "computed": "vs_trl_computed"}
    result = {
        **{names[mode]: one.ratio(one.times) for mode, one in results.items()},
        "products": ours.engine.stage.products,
        "runs": [one.as_json() for one in results.values()],
    }
    print(last_line("preference", result, repetitions=count, threads=options.threads, quick=options.quick))
    return 0


def measure(
    ours: Ours,
    trl_task: Callable[[Sequence[TokenRow], Mapping[str, Tensor], bool], TrlTask],
    pairs: Sequence[TokenRow],
    count: int,
    precomputed: bool,
) -> Measured:
    """A first repetition, which is not counted, has the shortest rows: every library is warm then."""
    times: list[dict[str, float]] = []
    processor: list[dict[str, float]] = []
    tokens: list[int] = []
    worst = 0.0
    each = BATCH * STEPS
    few = shortest(pairs, TASKS * each)
    for repetition in range(-1, count):
        start, some = max(0, repetition) * TASKS * each, pairs if repetition >= 0 else few
        tasks = [
            [some[(start + task * each + place) % len(some)] for place in range(each)]
            for task in range(TASKS)
        ]
        adapters = ours.begin()
        peers = [trl_task(rows, adapter, precomputed) for rows, adapter in zip(tasks, adapters, strict=True)]
        references = [ours.refer(rows) for rows in tasks] if precomputed else None
        losses: dict[str, list[list[float]]] = {}
        took: dict[str, float] = {}
        worked: dict[str, float] = {}
        for side in in_turns(["ours", "trl"], repetition):
            began = time.process_time()

            def work(side: str = side) -> None:
                if side == "ours":
                    losses[side] = ours.train(tasks, references)  # noqa: B023
                else:
                    losses[side] = [peer.train() for peer in peers]  # noqa: B023

            took[side] = seconds(work)
            worked[side] = time.process_time() - began
        flat = {side: [loss for own in found for loss in own] for side, found in losses.items()}
        worst = max(worst, check_losses(flat, TOLERANCE))
        if repetition >= 0:
            times.append(took)
            processor.append(worked)
            tokens.append(sum(len(row.ids) for rows in tasks for row in rows))
    return Measured(precomputed, times, processor, tokens, worst)
