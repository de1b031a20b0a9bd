"""How the tasks of a pipeline travel: groups, microbatches of each group's step, and what that should give. Pure.

The issue rule runs what is decided here, and ``mlora plan`` shows it. The choice (paper: figures d and e):

1. Candidates: from one group of all tasks to a group for each, balanced by tokens (``group_tasks``). For each, microbatches
   of several widths; a group gets as many as its step holds of that width, so that all microbatches of a round are about
   as wide, whichever group they belong to. Rows are never cut, and no microbatch is planned above ``budget``.
2. A candidate that would hold more tokens on a stage than ``held`` allows is out, as long as another one is not.
3. Of the others, the one whose round (a step of every task) is over first; of such, the one with the fewest microbatches.

So few tasks are split until the bubble is gone, many tasks are fused until the groups just fill the pipeline, and on one
stage all tasks share the widest microbatches that the budget allows: as one group, or on a GPU as two, if that takes no
more microbatches, so that one computes while the host has its turn with the other.

How long a round takes:

* no less than the busiest stage computes: ``max over s of (sum over microbatches of cost_s)``;
* no less than a group's own step needs, whose next one may not enter before it is back: all its microbatches on the busiest
  stage, the last one's way over the others, and the host's turn. With M equal microbatches in a round, N of them of one
  group, this is the longer one when ``M - N < D - 1``; for L equal groups, ``(L - 1) * N < D - 1`` (the paper's condition);
* and more when widths vary: a stage that is done with a narrow microbatch waits for the wide one before it. Microbatches
  beyond the necessary ones are a reserve against that. ``uneven_odds`` estimates it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mlora_worker.protocol import TrainingSettings
from mlora_worker.stream.costs import StageCost
from mlora_worker.stream.grouping import group_tasks, microbatches_wanted

# Fitted to the simulator for 2 to 8 stages and deviations of 5 to 35 %: root mean square error 0.02 (of the time).
_ODDS, _RESERVE = 0.65, 0.8
_MOST_COUNTS = 16  # candidates for the microbatches of a round: plans are made while the pipeline runs


@dataclass(frozen=True, slots=True)
class TaskLoad:
    """What a task brings to a round."""

    tokens: int  # of a usual step
    rows: int  # of a step
    spread: float = 0.0  # standard deviation of a row's tokens, as part of their mean
    limit: int | None = (
        None  # most tokens of a microbatch with rows of it, where that is less than the budget
    )


def rows_per_step(training: TrainingSettings) -> int:
    return training.batch_size * training.gradient_accumulation_steps


def load_of(rows: Sequence[int], rows_per_step: int) -> TaskLoad:
    """The load of a task whose data set has rows of so many tokens each. Raises ValueError without a row."""
    if not rows:
        raise ValueError("a task needs at least one row")
    mean = sum(rows) / len(rows)
    deviation = math.sqrt(sum((length - mean) ** 2 for length in rows) / len(rows))
    each_step = min(rows_per_step, len(rows))
    return TaskLoad(max(1, round(mean * each_step)), each_step, deviation / mean if mean else 0.0)


@dataclass(frozen=True, slots=True)
class Group:
    """Tasks that share microbatches; one step of each is one step of the group."""

    tasks: tuple[str, ...]
    tokens: int  # of a usual step
    microbatches: int  # that the step is cut into
    widest: int  # tokens of the widest one, with usual rows

    @property
    def tokens_per_microbatch(self) -> float:
        return self.tokens / self.microbatches


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """The decision and its forecast. Costs are in the unit of the cost model."""

    groups: tuple[Group, ...] = ()
    round_cost: float = 0.0  # until every task has done a step
    busy: tuple[float, ...] = ()  # of it, per stage
    held: tuple[int, ...] = ()  # per stage, most tokens whose activations it holds at once

    @property
    def tokens(self) -> int:
        """Of a round."""
        return sum(group.tokens for group in self.groups)

    @property
    def microbatches(self) -> int:
        """Of a round."""
        return sum(group.microbatches for group in self.groups)

    @property
    def widest(self) -> int:
        return max((group.widest for group in self.groups), default=0)

    @property
    def bubble(self) -> float:
        """Part of the time in which the busiest stage waits for others."""
        return 1 - max(self.busy) / self.round_cost if self.groups else 0.0

    @property
    def idle(self) -> float:
        """Part of all stages' time in which they do nothing: the bubble, and stages with less to do."""
        return 1 - sum(self.busy) / (len(self.busy) * self.round_cost) if self.groups else 0.0


def plan_stream(
    tasks: Mapping[str, TaskLoad],
    costs: Sequence[StageCost],
    budget: int,
    held: Sequence[int] | None = None,
) -> StreamPlan:
    """The plan for ``tasks`` (in joining order) on ``len(costs)`` stages.

    ``budget``: most tokens of a microbatch; a longer single row travels alone. ``held``: per stage, most tokens whose
    activations fit into its memory; None: any number. Where no plan keeps to ``held``, the one that exceeds it least.
    """
    if not tasks:
        return StreamPlan(held=(0,) * len(costs))
    tokens = {task: load.tokens for task, load in tasks.items()}
    budgets = [budget]
    if (
        held is not None
    ):  # of microbatches so narrow that as many as a stage can take in fit, whatever the tasks are
        budgets.append(
            max(1, min(budget, *(own // n for own, n in zip(held, _most_held(len(costs)), strict=True))))
        )
    best: tuple[tuple[float, float, int, int], StreamPlan] | None = None
    for count in _group_counts(len(tasks), len(costs), costs[0].turn):
        groups = [_Bundle.of(names, tasks) for names in group_tasks(tokens, count)]
        for microbatches in _microbatch_counts(groups, len(costs), budgets):
            plan = forecast(groups, microbatches, costs)
            excess = max(0, *(a - b for a, b in zip(plan.held, held, strict=True))) if held else 0
            rank = (float(excess), plan.round_cost, plan.microbatches, count)
            if best is None or rank < best[0]:
                best = (rank, plan)
    assert best is not None
    return best[1]


def uneven_odds(stages: int, reserve: int, deviation: float) -> float:
    """Idle time over busy time that microbatches of uneven width cause.

    ``reserve``: microbatches in flight beyond the ``stages - 1`` that hide a round trip. ``deviation``: standard
    deviation of their tokens, as part of the mean. Empirical.
    """
    if stages == 1 or deviation <= 0:
        return 0.0
    return (
        _ODDS
        * deviation
        * math.log2(stages)
        * math.exp(-_RESERVE * reserve / ((stages - 1) * math.sqrt(deviation)))
    )


def _most_held(stages: int) -> tuple[int, ...]:
    """Per stage, the most microbatches that it takes in before the first one's gradient is back."""
    return tuple(3 * (stages - stage) - 2 for stage in range(stages))


def tokens_held(tokens: int, widest: int, stages: int) -> tuple[int, ...]:
    """Per stage, the most tokens whose activations it holds at once, with microbatches of up to ``widest`` tokens.

    No more than a step of every task (``tokens``) is ever under way. Nor does a stage hold more microbatches than it can
    take in before the first one's gradient is back: with a backward twice as long as a forward these are
    ``3 * (stages - stage) - 2``; the last stage holds one.
    """
    return tuple(min(tokens, most * widest) for most in _most_held(stages))


@dataclass(frozen=True, slots=True)
class _Bundle:
    """A candidate for a group."""

    tasks: tuple[str, ...]
    tokens: int
    rows: int
    spread: float  # of its rows
    limit: int | None

    @classmethod
    def of(cls, names: tuple[str, ...], tasks: Mapping[str, TaskLoad]) -> _Bundle:
        loads = [tasks[name] for name in names]
        tokens, rows = sum(load.tokens for load in loads), sum(load.rows for load in loads)
        mean = tokens / rows
        # Of the rows of several tasks: the spread within each and that between their means.
        squares = sum(load.rows * (load.tokens / load.rows) ** 2 * (1 + load.spread**2) for load in loads)
        limit = min((load.limit for load in loads if load.limit is not None), default=None)
        return cls(names, tokens, rows, math.sqrt(max(0.0, squares / rows / mean**2 - 1)), limit)

    def fewest(self, budget: int) -> int:
        """Microbatches that ``budget`` asks for, with usual rows."""
        most = budget if self.limit is None else min(budget, self.limit)
        rows_each = max(1, most * self.rows // self.tokens)
        return -(-self.rows // rows_each)


def _group_counts(tasks: int, stages: int, turn: float) -> Iterator[int]:
    """Numbers of groups worth a look: all small ones, then in growing steps to three times the stages. On one stage two
    groups hide the host's turn, if there is any."""
    most = min(tasks, 3 * stages if stages > 1 else 1 + (turn > 0))
    count = 1
    while count < most:
        yield count
        following = count + 1 + count // 8
        if count < stages < min(following, most):
            yield stages
        count = following
    yield most


def _microbatch_counts(
    groups: Sequence[_Bundle], stages: int, budgets: Sequence[int]
) -> Iterator[tuple[int, ...]]:
    """Numbers of microbatches per group worth a look, each once: all that keep to one of ``budgets``."""
    seen: set[tuple[int, ...]] = set()
    for wanted in _wishes([group.tokens for group in groups], stages):
        for budget in budgets:
            counts = tuple(
                min(group.rows, max(group.fewest(budget), number))
                for group, number in zip(groups, wanted, strict=True)
            )
            if counts not in seen:
                seen.add(counts)
                yield counts


def _wishes(tokens: Sequence[int], stages: int) -> Iterator[tuple[int, ...]]:
    """Numbers of microbatches for groups with so many tokens each, were rows and budgets no concern."""
    for number in (1, microbatches_wanted(len(tokens), stages)):  # for every group, however large
        yield (number,) * len(tokens)
    # As many as fit in a group's step of microbatches of one width: from a round of one for each group on.
    most = len(tokens) + (4 * stages if stages > 1 else 0)
    for total in range(len(tokens), most + 1, 1 + (most - len(tokens)) // _MOST_COUNTS):
        width = sum(tokens) / total
        yield tuple(max(1, round(one / width)) for one in tokens)


def forecast(
    groups: Sequence[_Bundle], microbatches: Sequence[int], costs: Sequence[StageCost]
) -> StreamPlan:
    """What a candidate should give; see the head of this file."""
    stages, total = len(costs), sum(microbatches)
    tokens = sum(group.tokens for group in groups)
    busy = tuple(cost.per_token * tokens + cost.per_microbatch * total for cost in costs)
    slowest_token = max(cost.per_token for cost in costs)
    slowest_launch = max(cost.per_microbatch for cost in costs)
    made, chains, squares = [], [], 0.0
    for group, number in zip(groups, microbatches, strict=True):
        row = group.tokens / group.rows
        narrow, wider = divmod(group.rows, number)  # rows of each; so many have one more
        widest = row * (narrow + (wider > 0))
        over_others = sum(cost.of(widest) for cost in costs) - max(cost.of(widest) for cost in costs)
        chains.append(slowest_token * group.tokens + slowest_launch * number + over_others + costs[0].turn)
        for rows, times in ((narrow, number - wider), (narrow + 1, wider)):
            squares += times * (rows * row) ** 2 * (1 + group.spread**2 / rows)
        made.append(Group(group.tasks, group.tokens, number, math.ceil(widest)))
    deviation = math.sqrt(max(0.0, squares / total / (tokens / total) ** 2 - 1))
    reserve = max(0, total - max(microbatches) - (stages - 1))
    least = max(*busy, *chains)
    widest_of_all = max(group.widest for group in made)
    return StreamPlan(
        groups=tuple(made),
        round_cost=least * (1 + uneven_odds(stages, reserve, deviation)),
        busy=busy,
        held=tokens_held(tokens, widest_of_all, stages),
    )
