"""This project's side: all tasks' steps through one stage engine that holds the whole model.

The issue rule of the pipeline decides what shares a microbatch, as it does in a worker.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

from torch import Tensor

from bench.rows import Batch, pack
from bench.sides import MAX_GRAD_NORM, Setting
from mlora_worker.data.prepare import TokenRow
from mlora_worker.lora.groups import Products
from mlora_worker.model.stage import Stage
from mlora_worker.pipeline.engine import StageEngine
from mlora_worker.protocol import Training, WorkerConfig
from mlora_worker.stream.grouping import Part
from mlora_worker.stream.items import Load, Segment, Train, Update
from mlora_worker.stream.rule import IssueRule

BUDGET: int = WorkerConfig.model_fields["microbatch_tokens"].default


@dataclass
class Stopwatch:
    """Seconds spent in the parts of a step."""

    parts: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        began = perf_counter()
        yield
        self.parts[part] += perf_counter() - began


class Ours:
    """``separate_updates``: close each step at its end, so that updates can be timed by themselves. Else an update
    rides with the task's next microbatch, as in a worker: each step but the first closes the former one.
    ``products``: others than those of the stage's device.
    """

    name = "ours"

    def __init__(
        self,
        stage: Stage,
        setting: Setting,
        budget: int = BUDGET,
        *,
        separate_updates: bool = False,
        products: Products | None = None,
    ) -> None:
        self.engine = StageEngine(stage, products=products)
        self.watch = Stopwatch()
        self._names = [f"task-{number}" for number in range(setting.tasks)]
        for seed, name in enumerate(self._names):
            self.engine.load(Load(number=0, task=name, lora=setting.lora, training=Training(seed=seed)))
        self._budget = budget
        self._separate_updates = separate_updates
        self._updates: dict[str, Update] = {}
        self._number = self._step = 0

    def adapters(self) -> list[dict[str, Tensor]]:
        """Of each task, by PEFT's names."""
        return [self.engine.export(name) for name in self._names]

    def step(self, batch: Batch, learning_rate: float) -> list[float]:
        self._step += 1
        rows = dict(zip(self._names, batch.rows, strict=True))
        supervised = dict(zip(self._names, batch.supervised, strict=True))
        loss_sums = dict.fromkeys(self._names, 0.0)
        squares = dict.fromkeys(self._names, 0.0)
        rule = IssueRule(1, self._budget)
        for name, own in rows.items():
            rule.join(name, sum(len(row.ids) for row in own), len(own))
        started: set[str] = set()
        while parts := rule.next(
            lambda name: [len(row.ids) for row in rows[name]],
            lambda name: name not in started,
        ):
            started.update(part.task for part in parts)
            item = self._item(parts, supervised)
            losses, norms = self._run(item, [row for part in parts for row in _rows_of(part, rows)])
            for part, loss, norm in zip(parts, losses, norms, strict=True):
                loss_sums[part.task] += loss
                squares[part.task] += norm
            rule.returned([part.task for part in parts])
        for name in self._names:
            clip = min(1.0, MAX_GRAD_NORM / (squares[name] ** 0.5 + 1e-6))
            self._updates[name] = Update(step=self._step, learning_rate=learning_rate, clip=clip)
        if self._separate_updates:
            with self.watch("update"):
                for name, update in self._updates.items():
                    self.engine.apply(name, update)
                self._updates.clear()
        return [loss_sums[name] / supervised[name] for name in self._names]

    def _item(self, parts: Sequence[Part], supervised: Mapping[str, int]) -> Train:
        self._number += 1
        return Train(
            number=self._number,
            segments=tuple(
                Segment(
                    task=part.task,
                    step=self._step,
                    lengths=part.lengths,
                    first_row=part.first_row,
                    weight=1 / supervised[part.task],
                    closes_step=part.closes_step,
                    update=self._updates.pop(part.task, None) if part.first_row == 0 else None,
                )
                for part in parts
            ),
        )

    def _run(self, item: Train, rows: Sequence[TokenRow]) -> tuple[list[float], list[float]]:
        """Sums of losses and squared norms of each segment."""
        packed = pack(rows)
        with self.watch("forward"):
            out = self.engine.forward(item, token_ids=packed.ids, hidden=None, labels=packed.targets)
        with self.watch("backward"):
            back = self.engine.backward(item.number, None)
        assert out.losses is not None
        return out.losses.tolist(), back.squared_norms.tolist()


def _rows_of(part: Part, rows: Mapping[str, Sequence[TokenRow]]) -> Sequence[TokenRow]:
    own = rows[part.task][part.first_row : part.first_row + len(part.lengths)]
    assert [len(row.ids) for row in own] == list(part.lengths)
    return own
