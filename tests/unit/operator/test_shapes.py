"""A coordinator that tells of another model with each report is not listened to."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from mlora_operator.coordinator.shapes import MOST, WITHIN, Shapes, Unsteady
from mlora_worker.protocol import Report
from tests.fixtures.toy_facts import toy_facts, toy_stages

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)


def report(run: str, vocabulary: int | None = 100, capacity: int = 2**33) -> Report:
    facts = toy_facts(vocab_size=vocabulary) if vocabulary is not None else None
    stages = toy_stages(capacity_bytes=capacity) if vocabulary is not None else ()
    return Report(
        run_id=run, sequence=1, plan_generation=0, ready=facts is not None, facts=facts, stages=stages
    )


def test_a_group_that_starts_again_and_again_tells_the_same() -> None:
    shapes = Shapes()
    for run in range(100):
        shapes.check(report(f"run-{run}", None), NOW)
        shapes.check(report(f"run-{run}"), NOW)


@pytest.mark.parametrize("other", [{"vocabulary": 101}, {"capacity": 2**34}])
def test_no_run_has_two_shapes(other: dict[str, int]) -> None:
    shapes = Shapes()
    shapes.check(report("run-1"), NOW)
    with pytest.raises(Unsteady, match="than at their start"):
        shapes.check(report("run-1", **other), NOW)
    shapes.check(report("run-1"), NOW)
    shapes.check(report("run-2", **other), NOW)


def test_a_pipeline_may_be_changed_but_not_all_the_time() -> None:
    shapes = Shapes()
    for number in range(MOST + 1):
        shapes.check(report(f"run-{number}", 100 + number), NOW)
    with pytest.raises(Unsteady, match="within 60 minutes"):
        shapes.check(report("run-x", 1), NOW + WITHIN - timedelta(seconds=1))
    shapes.check(report("run-y", 2), NOW + WITHIN)


def test_a_clock_that_was_set_back_keeps_nobody_out() -> None:
    shapes = Shapes()
    for number in range(MOST + 1):
        shapes.check(report(f"run-{number}", 100 + number), NOW)
    shapes.check(report("run-x", 1), NOW - timedelta(days=1))
