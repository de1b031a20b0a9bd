"""Plans of the stream: who travels together, in how many microbatches, and what that should give."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.pipeline_sim.simulate import LinearCosts, Workload, simulate
from mlora_worker.stream.costs import StageCost, even_costs
from mlora_worker.stream.grouping import group_tasks, microbatches_wanted
from mlora_worker.stream.planner import Group, StreamPlan, TaskLoad, load_of, plan_stream, uneven_odds
from mlora_worker.stream.rule import IssueRule
from mlora_worker.stream.timeline import bubbles, makespan

ROW = 100


def equal_tasks(count: int, rows: int = 60) -> dict[str, TaskLoad]:
    """Rows of one length."""
    return {f"t{index}": TaskLoad(rows * ROW, rows) for index in range(count)}


def shape(plan: StreamPlan) -> list[tuple[str, int]]:
    """Per group the tasks, joined, and the microbatches."""
    return [("+".join(group.tasks), group.microbatches) for group in plan.groups]


@pytest.mark.parametrize(
    ("story", "stages", "tasks", "budget", "expected"),
    [
        ("no task", 2, 0, 10_000, []),
        ("one stage fuses all tasks into the widest that the budget allows", 1, 3, 18_000, [("t0+t1+t2", 1)]),
        ("one stage, a smaller budget", 1, 3, 6000, [("t0+t1+t2", 3)]),
        ("two tasks on two stages take turns", 2, 2, 10_000, [("t0", 1), ("t1", 1)]),
        ("few tasks are split: (2 - 1) * 3 >= 4 - 1", 4, 2, 10_000, [("t0", 3), ("t1", 3)]),
        ("three tasks on four stages", 4, 3, 10_000, [("t0", 2), ("t1", 2), ("t2", 2)]),
        ("as many tasks as stages are not split", 3, 3, 10_000, [("t0", 1), ("t1", 1), ("t2", 1)]),
        ("many tasks widen the groups", 2, 6, 60_000, [("t0+t2+t4", 1), ("t1+t3+t5", 1)]),
        ("but not above the budget", 2, 6, 9000, [("t0+t2+t4", 2), ("t1+t3+t5", 2)]),
    ],
)
def test_equal_rows(
    story: str, stages: int, tasks: int, budget: int, expected: list[tuple[str, int]]
) -> None:
    plan = plan_stream(equal_tasks(tasks), even_costs(stages), budget)
    assert shape(plan) == expected, story
    assert plan.bubble == pytest.approx(0), story


@pytest.mark.parametrize("stages", range(2, 9))
@pytest.mark.parametrize("tasks", range(2, 10))
def test_equal_tasks_leave_no_bubble(stages: int, tasks: int) -> None:
    plan = plan_stream(equal_tasks(tasks), even_costs(stages), 10**6)
    others = plan.microbatches - max(group.microbatches for group in plan.groups)
    assert others >= stages - 1
    assert plan.bubble == pytest.approx(0)


def test_a_lone_task_is_split_until_launches_cost_more_than_the_bubble() -> None:
    """N microbatches on D stages take (N + D - 1) / N of the busy time."""
    lone = equal_tasks(1, rows=16)
    free = plan_stream(lone, even_costs(4), 10_000)
    assert free.groups[0].microbatches == 16
    assert free.bubble == pytest.approx(1 - 16 / (16 + 3))
    dear = plan_stream(lone, (StageCost(1.0, 200.0),) * 4, 10_000)
    assert 1 < dear.groups[0].microbatches < 16


@pytest.mark.parametrize(
    ("story", "turn", "budget", "expected"),
    [
        ("no microbatch more: one group computes during the other's turn", 128, 12_000, [("t0+t2", 1), ("t1+t3", 1)]),
        ("a second microbatch would cost more than the turn", 128, 24_000, [("t0+t1+t2+t3", 1)]),
        ("a turn that is dearer than that", 512, 24_000, [("t0+t2", 1), ("t1+t3", 1)]),
        ("no turn", 0, 12_000, [("t0+t1+t2+t3", 2)]),
    ],
)  # fmt: skip
def test_on_one_stage_two_groups_hide_the_turn_of_the_host(
    story: str, turn: int, budget: int, expected: list[tuple[str, int]]
) -> None:
    plan = plan_stream(equal_tasks(4), (StageCost(1.0, 256.0, turn),), budget)
    assert shape(plan) == expected, story
    hidden = len(expected) == 2
    assert (plan.round_cost == plan.busy[0]) == (hidden or not turn)


def test_a_turn_counts_once_a_step_on_any_number_of_stages() -> None:
    """A lone task's next step begins a turn after its former one has come back."""
    tasks = equal_tasks(1, rows=1)
    without = plan_stream(tasks, (StageCost(1.0), StageCost(1.0)), 10_000)
    with_turn = plan_stream(tasks, (StageCost(1.0, turn=50.0), StageCost(1.0)), 10_000)
    assert with_turn.round_cost == without.round_cost + 50


def test_a_task_that_dwarfs_the_others_is_cut_to_their_width() -> None:
    tasks = {"big": TaskLoad(4000, 40), "a": TaskLoad(400, 4), "b": TaskLoad(400, 4), "c": TaskLoad(400, 4)}
    plan = plan_stream(tasks, even_costs(4), 10_000)
    widths = [group.tokens_per_microbatch for group in plan.groups]
    assert max(widths) <= 1.5 * min(widths)
    assert plan.bubble < 0.05
    naive = naive_plan(tasks, 4)
    assert naive.groups[0].tokens_per_microbatch >= 10 * naive.groups[1].tokens_per_microbatch


def test_rows_that_vary_are_given_a_reserve_of_microbatches() -> None:
    even = plan_stream(equal_tasks(8), (StageCost(1.0, 16.0),) * 2, 100_000)
    varied = {name: TaskLoad(load.tokens, load.rows, 0.5) for name, load in equal_tasks(8, rows=4).items()}
    uneven = plan_stream(varied, (StageCost(1.0, 16.0),) * 2, 100_000)
    assert even.microbatches == 2
    assert uneven.microbatches >= 4


def test_a_task_with_a_limit_keeps_its_group_narrow() -> None:
    tasks = {"a": TaskLoad(1000, 10, limit=250), "b": TaskLoad(1000, 10)}
    plan = plan_stream(tasks, even_costs(1), 10_000)
    assert plan.widest <= 250


def test_tokens_held_are_kept_to_what_the_memory_allows() -> None:
    tasks = equal_tasks(8)
    free = plan_stream(tasks, even_costs(4), 100_000)
    tight = plan_stream(tasks, even_costs(4), 100_000, held=(8000, 8000, 8000, 8000))
    assert free.held[0] > 8000
    assert max(tight.held) <= 8000
    least = plan_stream(tasks, even_costs(4), 100_000, held=(1, 1, 1, 1))
    assert least.widest == ROW, "no plan fits: the one that exceeds least"


@pytest.mark.parametrize(
    ("rows", "per_step", "expected"),
    [
        ([10, 30], 2, TaskLoad(40, 2, 0.5)),
        ([10, 30], 1, TaskLoad(20, 1, 0.5)),
        ([7], 8, TaskLoad(7, 1, 0.0)),
    ],
)
def test_the_load_of_a_task(rows: list[int], per_step: int, expected: TaskLoad) -> None:
    assert load_of(rows, per_step) == expected


loads = st.builds(
    lambda rows, mean, spread: TaskLoad(rows * mean, rows, spread),
    st.integers(1, 40),
    st.integers(1, 300),
    st.sampled_from([0.0, 0.2, 0.5]),
)
many = st.lists(loads, min_size=1, max_size=9).map(lambda some: {f"t{i}": one for i, one in enumerate(some)})
costs = st.lists(st.builds(StageCost, st.floats(0.1, 10), st.floats(0, 100)), min_size=1, max_size=6)


@given(tasks=many, costs=costs, budget=st.integers(50, 5000))
def test_any_plan_has_each_task_once_keeps_the_budget_and_is_the_same_each_time(
    tasks: dict[str, TaskLoad], costs: list[StageCost], budget: int
) -> None:
    plan = plan_stream(tasks, costs, budget)
    assert plan == plan_stream(tasks, costs, budget)
    assert sorted(task for group in plan.groups for task in group.tasks) == sorted(tasks)
    for group in plan.groups:
        rows = sum(tasks[task].rows for task in group.tasks)
        assert 1 <= group.microbatches <= rows
        assert group.widest <= budget or group.microbatches == rows
    assert 0 <= plan.bubble < 1
    assert plan.bubble <= plan.idle + 1e-9
    assert max(plan.busy) <= plan.round_cost * (1 + 1e-9)


# --- against the simulator -------------------------------------------------------------------------------------------


class PlannedRule(IssueRule):
    """Knows the rows of its tasks, as the coordinator does."""

    def __init__(self, loads: Mapping[str, TaskLoad], costs: Sequence[StageCost], budget: int) -> None:
        super().__init__(len(costs), budget, costs)
        self._known = loads

    def join(self, task: str, *_: float) -> None:  # type: ignore[override]
        load = self._known[task]
        super().join(task, load.tokens, load.rows, load.spread)


def naive_plan(tasks: Mapping[str, TaskLoad], stages: int) -> StreamPlan:
    """As many groups as stages, all steps cut alike: the paper's condition and nothing else."""
    names = group_tasks({name: load.tokens for name, load in tasks.items()}, stages)
    wanted = microbatches_wanted(len(names), stages)
    return StreamPlan(
        tuple(Group(group, sum(tasks[task].tokens for task in group), wanted, 0) for group in names)
    )


class NaiveRule(PlannedRule):
    def _regroup(self) -> None:
        super()._regroup()
        self._groups.clear()
        self._groups.extend(naive_plan(self._loads, len(self._costs)).groups)


def workloads(seed: int, tasks: int, spread: float) -> list[Workload]:
    """Tasks of 12 steps with rows around 200 tokens; batches of 2 to 12 rows."""
    random_ = random.Random(seed)
    return [
        Workload(
            f"t{index}",
            [[max(20, round(random_.gauss(200, 200 * spread))) for _ in range(rows)] for _ in range(12)],
        )
        for index, rows in enumerate(random_.randint(2, 12) for _ in range(tasks))
    ]


def run(work: list[Workload], rule: type[PlannedRule], stages: int, launch: int) -> tuple[float, float]:
    """Makespan and the busiest stage's bubble in the simulator, with a launch that costs ``launch`` tokens."""
    known = {
        one.task: load_of([row for step in one.steps for row in step], len(one.steps[0])) for one in work
    }
    cost = tuple(StageCost(3e-3, launch * 3e-3) for _ in range(stages))
    linear = LinearCosts((1e-3,) * stages, (2e-3,) * stages, per_microbatch=launch * 1.5e-3)
    timeline = simulate(work, stages, 4096, linear, lambda _, budget: rule(known, cost, budget))
    return makespan(timeline), min(bubbles(timeline))


@pytest.mark.parametrize("spread", [0.0, 0.35])
@pytest.mark.parametrize(("stages", "tasks"), [(2, 2), (2, 5), (4, 2), (4, 6), (8, 3)])
def test_a_plan_is_not_slower_than_the_naive_one_in_the_simulator(
    stages: int, tasks: int, spread: float
) -> None:
    ratios = []
    for seed in range(2):
        work = workloads(seed, tasks, spread)
        planned, naive = (run(work, rule, stages, launch=8)[0] for rule in (PlannedRule, NaiveRule))
        ratios.append(planned / naive)
    assert max(ratios) <= 1.03
    assert sum(ratios) / len(ratios) <= 1.0


@pytest.mark.parametrize(("stages", "groups"), [(2, 2), (2, 3), (4, 4), (4, 6), (8, 10)])
@pytest.mark.parametrize("deviation", [0.1, 0.3])
def test_the_estimate_of_uneven_widths_agrees_with_the_simulator(
    stages: int, groups: int, deviation: float
) -> None:
    """Equal groups of one microbatch each, whose widths vary."""
    random_ = random.Random(7)
    steps = 60
    work = [
        Workload(f"t{i}", [[max(10, round(random_.gauss(500, 500 * deviation)))] for _ in range(steps)])
        for i in range(groups)
    ]
    linear = LinearCosts((1e-3,) * stages, (2e-3,) * stages)
    timeline = simulate(work, stages, 10**6, linear, lambda count, budget: OneEach(count, budget))
    odds = uneven_odds(stages, groups - 1 - (stages - 1), deviation)
    assert min(bubbles(timeline)) == pytest.approx(odds / (1 + odds), abs=0.08)


class OneEach(IssueRule):
    """Every task its own group, every step one microbatch."""

    def _regroup(self) -> None:
        super()._regroup()
        self._groups.clear()
        self._groups.extend(Group((task,), load.tokens, 1, load.tokens) for task, load in self._loads.items())
