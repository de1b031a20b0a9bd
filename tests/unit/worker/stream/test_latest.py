"""The newest piece of a timeline."""

from __future__ import annotations

import pytest

from bench.pipeline_sim.simulate import EvenCosts, Workload, simulate
from mlora_worker.stream.timeline import ended, latest, returns, started

TIMELINE = simulate([Workload("a", [[10]] * 20), Workload("b", [[10]] * 20)], 3, 100, EvenCosts(1e-3, 2e-3))


@pytest.mark.parametrize("count", [1, 2, 7])
def test_it_holds_so_many_returns_and_ends_with_the_newest(count: int) -> None:
    piece = latest(TIMELINE, count)
    moments = returns(TIMELINE)
    assert (started(piece.spans), ended(piece.spans)) == (moments[-count - 1], moments[-1])
    assert len(returns(piece)) == count
    assert all(moments[-count - 1] <= span.start < span.end <= moments[-1] for span in piece.spans)


def test_of_fewer_it_is_the_whole() -> None:
    assert latest(TIMELINE, len(returns(TIMELINE))) == TIMELINE


def test_the_newest_of_the_newest_is_the_same() -> None:
    assert latest(latest(TIMELINE, 5), 5) == latest(TIMELINE, 5)
