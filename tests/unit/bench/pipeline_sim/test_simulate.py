"""The simulated stream: nothing is lost, done twice or out of order; no stage does two things at once; no deadlock."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.pipeline_sim.fixed_rule import FixedRule
from bench.pipeline_sim.formulae import has_no_bubble, lorapp_bubble, lorapp_held
from bench.pipeline_sim.simulate import EvenCosts, LinearCosts, Workload, simulate
from mlora_worker.stream.timeline import (
    Timeline,
    bubble,
    bubbles,
    makespan,
    peak_microbatches,
    peak_tokens,
    window_of_microbatches,
)
from tests.fixtures.stories import stories

rows = st.lists(st.integers(1, 300), min_size=1, max_size=6)
steps = st.lists(rows, min_size=1, max_size=4)
workloads = st.lists(st.tuples(steps, st.floats(0, 2)), min_size=1, max_size=5).map(
    lambda found: [Workload(f"t{i}", steps, joins) for i, (steps, joins) in enumerate(found)]
)


def seconds(stages: int) -> st.SearchStrategy[tuple[float, ...]]:
    return st.tuples(*[st.floats(1e-4, 1e-2)] * stages)


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[Workload], Timeline]:
    stages = draw(st.integers(1, 5))
    work = draw(workloads)
    costs = LinearCosts(
        draw(seconds(stages)),
        draw(seconds(stages)),
        per_microbatch=draw(st.floats(0, 0.1)),
        transfer_per_token=draw(st.sampled_from([0.0, 1e-4, 1e-2])),
        transfer_per_microbatch=draw(st.sampled_from([0.0, 0.05])),
    )
    patience = draw(st.sampled_from([0.0, 0.03, 0.5]))
    return work, simulate(work, stages, draw(st.integers(50, 1000)), costs, patience=patience)


@settings(max_examples=stories(15), deadline=None)
@given(runs())
def test_every_row_goes_forward_and_back_once_on_every_stage(run: tuple[list[Workload], Timeline]) -> None:
    work, timeline = run
    passes = Counter((span.stage, span.kind, span.number) for span in timeline.spans)
    assert set(passes.values()) <= {1}
    numbers = {span.number for span in timeline.spans}
    assert len(passes) == 2 * timeline.stages * len(numbers)
    for stage in range(timeline.stages):
        tokens = sum(s.tokens for s in timeline.spans if s.stage == stage and s.kind == "forward")
        assert tokens == sum(sum(map(sum, one.steps)) for one in work)


@settings(max_examples=stories(15), deadline=None)
@given(runs())
def test_a_stage_does_one_thing_at_a_time_and_microbatches_keep_their_order(
    run: tuple[list[Workload], Timeline],
) -> None:
    _, timeline = run
    for stage in range(timeline.stages):
        spans = sorted((s for s in timeline.spans if s.stage == stage), key=lambda s: (s.start, s.end))
        assert all(before.end <= after.start for before, after in pairwise(spans))
        for kind in ("forward", "backward"):
            numbers = [span.number for span in spans if span.kind == kind]
            assert numbers == sorted(numbers)


@settings(max_examples=stories(15), deadline=None)
@given(runs())
def test_a_microbatch_moves_from_stage_to_stage_and_back(run: tuple[list[Workload], Timeline]) -> None:
    _, timeline = run
    spans = {(s.stage, s.kind, s.number): s for s in timeline.spans}
    for number in {span.number for span in timeline.spans}:
        way = [spans[stage, "forward", number] for stage in range(timeline.stages)]
        way += [spans[stage, "backward", number] for stage in reversed(range(timeline.stages))]
        assert all(before.end <= after.start for before, after in pairwise(way))
        assert way[timeline.stages - 1].end == way[timeline.stages].start, (
            "the last stage turns round at once"
        )


@settings(max_examples=stories(20), deadline=None)
@given(workloads, st.integers(1, 4), st.integers(1, 3))
def test_a_step_enters_only_when_the_former_one_is_back(
    work: list[Workload], stages: int, microbatches: int
) -> None:
    costs = EvenCosts(1e-2, 3e-2, 1e-3)
    timeline = simulate(work, stages, 10**6, costs, lambda s, b: FixedRule(s, b, microbatches))
    for one in work:
        mine = [span for span in timeline.spans if span.stage == 0 and span.tasks == (one.task,)]
        starts = sorted(span.start for span in mine if span.kind == "forward")
        ends = sorted(span.end for span in mine if span.kind == "backward")
        entered = 0
        for sizes in one.steps:
            if entered:
                assert starts[entered] >= ends[entered - 1]
            entered += min(microbatches, len(sizes))


def steady(stages: int, groups: int, microbatches: int, costs: EvenCosts, **options: float) -> Timeline:
    work = [Workload(f"t{i}", [[1] * microbatches] * 11) for i in range(groups)]
    return simulate(
        work, stages, 10**6, costs, lambda stages, budget: FixedRule(stages, budget, microbatches), **options
    )


def steady_bubble(timeline: Timeline, each: int) -> float:
    return bubble(timeline, *window_of_microbatches(timeline, each * 4, each * 3))


shapes = st.tuples(st.integers(1, 7), st.integers(1, 7), st.integers(1, 5))


@settings(max_examples=stories(15), deadline=None)
@given(shapes, st.sampled_from([1.0, 2.0]))
def test_the_steady_bubble_is_the_formula(shape: tuple[int, int, int], backward: float) -> None:
    _, groups, microbatches = shape
    costs = EvenCosts(1e-3, backward * 1e-3)
    seen = steady_bubble(steady(*shape, costs, patience=0.0), groups * microbatches)
    assert seen == pytest.approx(lorapp_bubble(*shape), abs=1e-9)
    assert (seen < 1e-9) == has_no_bubble(*shape)
    patient = steady_bubble(steady(*shape, costs), groups * microbatches)
    assert seen - 1e-3 <= patient <= seen + 0.02


@settings(max_examples=10, deadline=None)
@given(shapes, st.sampled_from([1.0, 2.0]))
def test_a_stage_holds_no_more_than_the_bound(shape: tuple[int, int, int], backward: float) -> None:
    stages, groups, microbatches = shape
    timeline = steady(*shape, EvenCosts(1e-3, backward * 1e-3))
    for stage, held in enumerate(peak_microbatches(timeline)):
        assert held <= lorapp_held(stages, stage, groups, microbatches)
    assert peak_tokens(timeline) == peak_microbatches(timeline), "of one token each"


FULL = ((4, 4, 1), (4, 2, 3), (8, 8, 1), (8, 2, 7), (8, 4, 3))


@pytest.mark.parametrize("shape", FULL)
def test_patience_saves_a_full_pipeline_from_late_messages(shape: tuple[int, int, int]) -> None:
    """Without it one of the two ratios of backward to forward ends in a bubble of 10 % or more."""
    each = shape[1] * shape[2]

    def worst(patience: float) -> float:
        return max(
            steady_bubble(steady(*shape, EvenCosts(f, 0.06 - f, 3e-4), patience=patience), each)
            for f in (0.02, 0.03)
        )

    assert worst(0.0) > 0.1
    assert worst(0.03) < 0.012


def test_groups_that_share_microbatches_hold_fewer_tokens_than_a_stage_each() -> None:
    """Figures d and e: the same tasks alone or fused, both without a bubble."""
    work = [Workload(f"t{i}", [[100]] * 8) for i in range(8)]
    costs = EvenCosts(1e-3, 2e-3)
    fused = simulate(
        work, 4, 10**6, costs, lambda s, b: FixedRule(s, b, 1, [(f"t{i}", f"t{i + 4}") for i in range(4)])
    )
    assert {len(span.tasks) for span in fused.spans} == {2}
    assert bubbles(fused, *window_of_microbatches(fused, 4, 16)) == pytest.approx([0.0] * 4)


def test_a_task_that_joins_later_starts_later_and_nobody_waits_for_it() -> None:
    work = [Workload("a", [[10]] * 6), Workload("b", [[10]] * 2, joins=0.01)]
    timeline = simulate(work, 2, 100, EvenCosts(1e-3, 2e-3))
    first = min(span.start for span in timeline.spans if span.tasks == ("b",))
    assert 10_000_000 <= first <= 13_000_000
    alone = simulate(work[:1], 2, 100, EvenCosts(1e-3, 2e-3))
    end = max(span.end for span in timeline.spans if "a" in span.tasks)
    assert end <= makespan(alone) + 2 * 3_000_000


def test_no_tasks_make_an_empty_timeline() -> None:
    timeline = simulate([Workload("a", [])], 3, 10, EvenCosts(1.0, 1.0))
    assert timeline.spans == ()
    assert (makespan(timeline), bubble(timeline), peak_tokens(timeline)) == (0, 0.0, (0, 0, 0))
