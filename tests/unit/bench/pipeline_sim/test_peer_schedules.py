"""GPipe and 1F1B in the simulator's form, and the closed formulae of both."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.pipeline_sim import formulae
from bench.pipeline_sim.peer_schedules import Schedule, gpipe, one_f_one_b, run_schedule
from bench.pipeline_sim.simulate import EvenCosts, Microbatch
from mlora_worker.stream.timeline import bubble, makespan, peak_microbatches
from tests.fixtures.stories import stories

BOTH = {"gpipe": gpipe, "1f1b": one_f_one_b}


def microbatches(count: int, first: int = 1, task: str = "a") -> list[Microbatch]:
    return [Microbatch(first + n, (task,), 1) for n in range(count)]


@settings(max_examples=stories(40), deadline=None)
@given(st.sampled_from(sorted(BOTH)), st.integers(1, 8), st.integers(1, 10), st.sampled_from([1.0, 2.0]))
def test_the_bubble_of_a_flushed_step_is_the_formula(
    name: str, stages: int, count: int, backward: float
) -> None:
    timeline = run_schedule(BOTH[name], [microbatches(count)], stages, EvenCosts(1e-3, backward * 1e-3))
    assert bubble(timeline) == pytest.approx(formulae.flushed_bubble(stages, count), abs=1e-9)


@settings(max_examples=stories(40), deadline=None)
@given(st.integers(1, 8), st.integers(1, 10))
def test_what_stages_hold_is_the_formula(stages: int, count: int) -> None:
    costs = EvenCosts(1e-3, 2e-3)
    held = {
        name: peak_microbatches(run_schedule(one, [microbatches(count)], stages, costs))
        for name, one in BOTH.items()
    }
    assert held["gpipe"] == (formulae.gpipe_held(count),) * stages
    assert held["1f1b"] == tuple(formulae.one_f_one_b_held(stages, s, count) for s in range(stages))


@pytest.mark.parametrize("schedule", BOTH.values(), ids=BOTH)
def test_steps_come_one_after_the_other(schedule: Schedule) -> None:
    steps = [microbatches(3), microbatches(3, 4, "b")]
    timeline = run_schedule(schedule, steps, 4, EvenCosts(1e-3, 2e-3, 5e-4))
    first = [span for span in timeline.spans if span.tasks == ("a",)]
    second = [span for span in timeline.spans if span.tasks == ("b",)]
    assert max(span.end for span in first) <= min(span.start for span in second)
    assert makespan(timeline) == 2 * (max(s.end for s in first) - min(s.start for s in first))
    for stage in range(4):
        spans = sorted((s for s in timeline.spans if s.stage == stage), key=lambda s: s.start)
        assert all(before.end <= after.start for before, after in pairwise(spans))


def test_a_schedule_that_waits_for_itself_is_refused() -> None:
    with pytest.raises(ValueError, match="waits for itself"):
        run_schedule(lambda *_: [("backward", 0), ("forward", 0)], [microbatches(1)], 1, EvenCosts(1.0, 1.0))


TABLE = [
    # stages, groups, microbatches, bubble of LoRAPP, of a flushed schedule
    (4, 1, 4, 3 / 7, 3 / 7),
    (4, 2, 1, 0.5, 0.75),
    (4, 2, 3, 0.0, 0.5),
    (4, 4, 1, 0.0, 0.75),
    (1, 1, 1, 0.0, 0.0),
]


@pytest.mark.parametrize(("stages", "groups", "count", "lorapp", "flushed"), TABLE)
def test_known_bubbles(stages: int, groups: int, count: int, lorapp: float, flushed: float) -> None:
    assert formulae.lorapp_bubble(stages, groups, count) == pytest.approx(lorapp)
    assert formulae.flushed_bubble(stages, count) == pytest.approx(flushed)
    assert formulae.has_no_bubble(stages, groups, count) == (lorapp == 0)


def test_traffic() -> None:
    """Llama-2-7B in half precision on four devices, 4,096 tokens: a pipeline sends least by far."""
    pipeline = formulae.wire_bytes(4, 4096, 4096, 2)
    assert pipeline == 2 * 3 * 4096 * 4096 * 2
    assert formulae.tensor_parallel_bytes(4, 32, 4096, 4096, 2) == 128 * pipeline
    assert formulae.data_parallel_bytes(4, 6_700_000_000, 2) > 300 * pipeline
    assert formulae.wire_bytes(1, 4096, 4096, 2) == 0


def test_the_cost_of_messages_where_the_pipeline_is_just_full() -> None:
    assert formulae.latency_bubble(1, 1.0, 1.0) == 0
    assert formulae.latency_bubble(4, 0.5, 60.0) == pytest.approx(3 / 243)
