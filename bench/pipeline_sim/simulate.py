"""The stream with a cost model instead of devices: the same issue rule, the same order of work on every stage. Pure.

A stage does what ``pipeline/mailbox.py`` and ``pipeline/loop.py`` make a rank do:

1. the backward of the next microbatch whose gradient is here;
2. else, after the moment that ``Turns`` makes it wait, the forward of the next microbatch in order, if its hidden states
   are here (stage 0: what ``IssueRule`` lets in);
3. else nothing, until something arrives.

The last stage turns round from forward to backward at once. A channel between two stages carries one message at a time,
first in, first out. Loading, saving and unloading cost nothing here; an update is part of the forward that it rides with.
At the same moment whatever arrives is seen before a stage chooses.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mlora_worker.stream.planner import load_of
from mlora_worker.stream.rule import IssueRule
from mlora_worker.stream.timeline import Kind, Span, Timeline
from mlora_worker.stream.turns import PATIENCE, Turns


class Costs(Protocol):
    """Seconds that a microbatch of so many tokens takes."""

    def forward(self, stage: int, tokens: int) -> float: ...
    def backward(self, stage: int, tokens: int) -> float: ...
    def transfer(self, tokens: int) -> float:
        """From one stage to its neighbour, in either direction."""
        ...


@dataclass(frozen=True, slots=True)
class EvenCosts:
    """Every stage takes the same time, whatever the microbatch holds."""

    forward_seconds: float
    backward_seconds: float
    transfer_seconds: float = 0.0

    def forward(self, stage: int, tokens: int) -> float:  # noqa: ARG002
        return self.forward_seconds

    def backward(self, stage: int, tokens: int) -> float:  # noqa: ARG002
        return self.backward_seconds

    def transfer(self, tokens: int) -> float:  # noqa: ARG002
        return self.transfer_seconds


@dataclass(frozen=True, slots=True)
class LinearCosts:
    """Seconds a microbatch plus seconds a token; the latter may differ by stage."""

    forward_per_token: tuple[float, ...]  # of each stage
    backward_per_token: tuple[float, ...]
    per_microbatch: float = 0.0  # of each forward and each backward
    transfer_per_token: float = 0.0
    transfer_per_microbatch: float = 0.0

    def forward(self, stage: int, tokens: int) -> float:
        return self.per_microbatch + tokens * self.forward_per_token[stage]

    def backward(self, stage: int, tokens: int) -> float:
        return self.per_microbatch + tokens * self.backward_per_token[stage]

    def transfer(self, tokens: int) -> float:
        return self.transfer_per_microbatch + tokens * self.transfer_per_token


@dataclass(frozen=True, slots=True)
class Workload:
    """A task as the stream sees it: the token counts of the rows of each of its steps."""

    task: str
    steps: Sequence[Sequence[int]]
    joins: float = 0.0  # seconds after the start


class Deadlock(RuntimeError):
    """Work is left and nothing can move. The issue rule makes this impossible; the simulator looks anyway."""


def simulate(
    workloads: Sequence[Workload],
    stages: int,
    budget: int,
    costs: Costs,
    make_rule: Callable[[int, int], IssueRule] = IssueRule,
    patience: float = PATIENCE,
) -> Timeline:
    """Train every workload to its end on ``stages`` stages with microbatches of at most ``budget`` tokens.

    ``patience`` 0 makes stages greedy; see ``turns.py``.
    """
    return _Run(workloads, stages, make_rule(stages, budget), costs, patience).run()


@dataclass(frozen=True, slots=True)
class Microbatch:
    number: int
    tasks: tuple[str, ...]
    tokens: int


class _Supply:
    """Rank 0's decisions, as the dispatcher makes them: joins and leaves first, then the issue rule."""

    def __init__(self, workloads: Sequence[Workload], rule: IssueRule) -> None:
        self._rule = rule
        self._waiting = deque(sorted(workloads, key=lambda workload: workload.joins))
        self._steps = {workload.task: deque(workload.steps) for workload in workloads}
        self._number = 0

    def next(self, now: int) -> Microbatch | None:
        for task in self._rule.tasks:
            if not self._steps[task] and self._rule.is_idle(task):
                self._rule.leave(task)
        while self._waiting and nanoseconds(self._waiting[0].joins) <= now:
            workload = self._waiting.popleft()
            if workload.steps:
                load = load_of([row for step in workload.steps for row in step], len(workload.steps[0]))
                self._rule.join(workload.task, load.tokens, load.rows, load.spread)
        parts = self._rule.next(lambda task: self._steps[task][0], lambda task: bool(self._steps[task]))
        if parts is None:
            return None
        self._number += 1
        tokens = sum(sum(part.lengths) for part in parts)
        return Microbatch(self._number, tuple(part.task for part in parts), tokens)

    def returned(self, microbatch: Microbatch) -> None:
        for task in self._rule.returned(microbatch.tasks):
            self._steps[task].popleft()

    @property
    def finished(self) -> bool:
        return not any(self._steps.values())


@dataclass(slots=True)
class _Stage:
    turns: Turns
    busy: bool = False
    until: int | None = None  # no forward begins earlier, if it waits for a gradient
    gradients: deque[Microbatch] = field(default_factory=deque)  # arrived
    hidden: deque[Microbatch] = field(default_factory=deque)  # arrived
    up_free: int = 0  # when the channel to the former stage is free again
    down_free: int = 0  # when the channel to the next stage is


class _Run:
    def __init__(
        self, workloads: Sequence[Workload], stages: int, rule: IssueRule, costs: Costs, patience: float
    ) -> None:
        self._supply = _Supply(workloads, rule)
        self._stages = [_Stage(Turns(stages - index, patience)) for index in range(stages)]
        self._last = stages - 1
        self._costs = costs
        self._spans: list[Span] = []
        self._events: list[
            tuple[int, int, Callable[[], None]]
        ] = []  # moment, order of creation, what happens
        self._created = 0
        self._now = 0
        for workload in workloads:
            self._at(nanoseconds(workload.joins), lambda: None)

    def run(self) -> Timeline:
        while self._events:
            self._now = self._events[0][0]
            while self._events and self._events[0][0] == self._now:
                heapq.heappop(self._events)[2]()
            for index in range(len(self._stages)):
                self._choose(index)
        if not self._supply.finished:
            raise Deadlock(f"nothing moves any more after {self._now} ns, and tasks are not finished")
        return Timeline(stages=len(self._stages), spans=tuple(self._spans))

    def _at(self, moment: int, event: Callable[[], None]) -> None:
        self._created += 1
        heapq.heappush(self._events, (moment, self._created, event))

    def _choose(self, index: int) -> None:
        stage = self._stages[index]
        if stage.busy:
            return
        if stage.gradients:
            stage.until = None
            self._backward(index, stage.gradients.popleft(), self._now)
            return
        if stage.until is None:
            stage.until = self._now + round(stage.turns.wait)
            if stage.until > self._now:
                self._at(stage.until, lambda: None)
        if stage.until > self._now:
            return
        microbatch = self._following(index)
        if microbatch is not None:
            stage.until = None
            self._forward(index, microbatch)

    def _following(self, index: int) -> Microbatch | None:
        if index == 0:
            return self._supply.next(self._now)
        hidden = self._stages[index].hidden
        return hidden.popleft() if hidden else None

    def _forward(self, index: int, microbatch: Microbatch) -> None:
        end = self._now + nanoseconds(self._costs.forward(index, microbatch.tokens))
        self._note(index, "forward", microbatch, self._now, end)
        if index == self._last:
            self._backward(index, microbatch, end)
            return
        stage = self._stages[index]
        stage.busy = True
        stage.turns.forward()
        stage.turns.took(end - self._now)
        self._at(end, lambda: self._forwarded(index, microbatch))

    def _backward(self, index: int, microbatch: Microbatch, start: int) -> None:
        end = start + nanoseconds(self._costs.backward(index, microbatch.tokens))
        self._note(index, "backward", microbatch, start, end)
        stage = self._stages[index]
        stage.busy = True
        if index != self._last:
            stage.turns.backward()
            stage.turns.took(end - start)
        self._at(end, lambda: self._backwarded(index, microbatch))

    def _forwarded(self, index: int, microbatch: Microbatch) -> None:
        stage, following = self._stages[index], self._stages[index + 1]
        stage.busy = False
        stage.down_free = self._arrival(stage.down_free, microbatch)
        self._at(stage.down_free, lambda: following.hidden.append(microbatch))

    def _backwarded(self, index: int, microbatch: Microbatch) -> None:
        stage = self._stages[index]
        stage.busy = False
        if index == 0:
            self._supply.returned(microbatch)
            return
        former = self._stages[index - 1]
        stage.up_free = self._arrival(stage.up_free, microbatch)
        self._at(stage.up_free, lambda: former.gradients.append(microbatch))

    def _arrival(self, free: int, microbatch: Microbatch) -> int:
        return max(self._now, free) + nanoseconds(self._costs.transfer(microbatch.tokens))

    def _note(self, stage: int, kind: Kind, microbatch: Microbatch, start: int, end: int) -> None:
        self._spans.append(
            Span(
                stage=stage, kind=kind, number=microbatch.number, tasks=microbatch.tasks,
                tokens=microbatch.tokens, start=start, end=end,
            )
        )  # fmt: skip


def nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
