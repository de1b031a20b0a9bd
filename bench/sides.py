"""Two or more programs that train the same tasks: checked against each other, then timed in turns."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from bench.rows import Batch, deal, shortest
from mlora_worker.data.prepare import TokenRow
from mlora_worker.protocol import LoRAConfig

LEARNING_RATE = 2e-4
MAX_GRAD_NORM = 1.0
CHECKED_STEPS = 3  # before times are taken


class Disagreement(RuntimeError):
    """The sides compute different things: comparing their times would be void."""


@dataclass(frozen=True)
class Setting:
    """What every side trains."""

    tasks: int
    targets: tuple[str, ...]  # or ("all-linear",)
    rank: int = 16
    alpha: float = 32
    dropout: float = 0.05

    @property
    def lora(self) -> LoRAConfig:
        return LoRAConfig(rank=self.rank, alpha=self.alpha, dropout=self.dropout, target_modules=self.targets)


class Side(Protocol):
    """``step`` runs one optimizer step of every task, AdamW's update included, and gives each task's mean loss
    over its supervised tokens, before the update.
    """

    name: str

    def step(self, batch: Batch, learning_rate: float) -> list[float]: ...


class Adjustable(Side, Protocol):
    """A side whose adapters can be set."""

    def restore(self, adapters: Sequence[Mapping[str, Tensor]]) -> None:
        """``adapters[t]``: the whole adapter of task t, by PEFT's names."""
        ...


class HasAdapters(Side, Protocol):
    """A side that says what its adapters are."""

    def adapters(self) -> Sequence[Mapping[str, Tensor]]: ...


def check_losses(losses: Mapping[str, Sequence[float]], tolerance: float) -> float:
    """The largest relative difference to the first side. Raises Disagreement above ``tolerance``."""
    (first, expected), *others = losses.items()
    worst = 0.0
    for name, found in others:
        for task, (a, b) in enumerate(zip(expected, found, strict=True)):
            difference = abs(a - b) / max(abs(a), abs(b))
            if not difference <= tolerance:
                raise Disagreement(
                    f"task {task}: {first} has loss {a:.6f}, {name} {b:.6f}; they differ by {difference:.1e}, more "
                    f"than {tolerance:.0e}: this would compare two different computations"
                )
            worst = max(worst, difference)
    return worst


def train_alike(
    first: Side, others: Sequence[Side], batches: Sequence[Batch], tolerance: float, learning_rate: float
) -> float:
    """Let all sides do the same steps from the same adapters, and compare the losses of each step."""
    return max(
        check_losses({side.name: side.step(batch, learning_rate) for side in (first, *others)}, tolerance)
        for batch in batches
    )


def agree_without_dropout(
    ours: HasAdapters, others: Sequence[Adjustable], rows: Sequence[TokenRow], tasks: int, tolerance: float
) -> float:
    """A few steps of the same adapters, on short rows: each loss after an update must be the same on all sides."""
    for side in others:
        side.restore(ours.adapters())
    few = shortest(rows, tasks * CHECKED_STEPS)
    batches = [deal(few, tasks, 1, step) for step in range(CHECKED_STEPS)]
    return train_alike(ours, others, batches, tolerance, learning_rate=10 * LEARNING_RATE)


def warm_up(sides: Iterable[Side], batch: Batch) -> None:
    """A step as wide as those timed that leaves the adapters as they are: kernels are compiled, optimizers have their
    state, and each side's largest tensors have had their memory once.
    """
    for side in sides:
        side.step(batch, 0.0)


def in_turns(names: Sequence[str], repetition: int) -> list[str]:
    """The order of a repetition: every other one backwards, so that a drift of the machine favours nobody."""
    return list(names) if repetition % 2 == 0 else list(reversed(names))


def seconds(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """How long ``work`` takes, without Python's collector of cycles in between."""
    gc.collect()
    gc.disable()
    try:
        began = clock()
        work()
        return clock() - began
    finally:
        gc.enable()


def timed_step(side: Side, batch: Batch, learning_rate: float = LEARNING_RATE) -> tuple[float, list[float]]:
    """Seconds and losses of one step of every task."""
    losses: list[float] = []
    return seconds(lambda: losses.extend(side.step(batch, learning_rate))), losses


def median_ratio(times: Sequence[Mapping[str, float]], of: str, to: str) -> float:
    """Median over repetitions of ``of`` / ``to``: each repetition had the same rows on both sides."""
    return statistics.median(repetition[of] / repetition[to] for repetition in times)


def median_rate(times: Sequence[Mapping[str, float]], name: str, tokens: Sequence[int]) -> float:
    """Median over repetitions of tokens per second."""
    return statistics.median(
        count / repetition[name] for repetition, count in zip(times, tokens, strict=True)
    )
