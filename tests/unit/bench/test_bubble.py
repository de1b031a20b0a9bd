"""What the benchmark of the bubble reads off a timeline, on simulated ones whose bubble is known."""

from __future__ import annotations

import pytest

from bench.bubble import WARM_UP, Result, message_seconds, summary, throughput_bubble
from bench.pipeline_sim.fixed_rule import FixedRule
from bench.pipeline_sim.simulate import EvenCosts, Workload, simulate
from bench.sleepers import TOKENS, Shape
from mlora_worker.stream.timeline import Timeline


def shape(stages: int, groups: int, microbatches: int) -> Shape:
    return Shape(stages, groups, microbatches, WARM_UP + 5, 0.02, 0.04)


def timeline(of: Shape, message: float) -> Timeline:
    work = [Workload(f"task {n}", [[TOKENS] * of.microbatches] * of.rounds) for n in range(of.groups)]
    costs = EvenCosts(of.forward, of.backward, message)
    return simulate(work, of.stages, 10**9, costs, lambda s, b: FixedRule(s, b, of.microbatches))


@pytest.mark.parametrize(("stages", "groups", "microbatches"), [(2, 2, 1), (4, 4, 1), (4, 2, 1), (4, 1, 4)])
def test_the_bubble_by_throughput_is_the_formula(stages: int, groups: int, microbatches: int) -> None:
    one = shape(stages, groups, microbatches)
    expected = Result(one, 0.0, 0.0, 0.0).formula
    assert throughput_bubble(timeline(one, 0.0), one) == pytest.approx(expected, abs=1e-4)


def test_the_time_of_a_message_is_found_where_a_stage_waited_for_it() -> None:
    assert message_seconds(timeline(shape(4, 2, 1), 0.0007)) == pytest.approx(0.0007)


def test_the_summary_takes_the_worst_of_what_should_have_none_and_the_farthest_of_the_others() -> None:
    results = [
        Result(shape(2, 2, 1), 0.004, 0.0, 0.0),
        Result(shape(4, 4, 1), 0.009, 0.0, 0.0),
        Result(shape(4, 2, 1), 0.53, 0.0, 0.0),
        Result(shape(2, 1, 1), 0.49, 0.0, 0.0),
    ]
    found = summary(results)
    assert (found["measured"], found["predicted"]) == (0.009, 0.0)
    assert found["elsewhere"] == pytest.approx(0.03)
