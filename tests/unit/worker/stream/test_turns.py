"""When a stage waits for a gradient before another forward, and for how long."""

from __future__ import annotations

import pytest

from mlora_worker.stream.turns import Turns


def holding(stages_to_end: int, microbatches: int, usual: float = 10.0) -> Turns:
    turns = Turns(stages_to_end, patience=0.1)
    for _ in range(microbatches):
        turns.forward()
        turns.took(usual)
    return turns


@pytest.mark.parametrize(
    ("stages_to_end", "held", "wait"),
    [(4, 3, 0.0), (4, 4, 1.0), (4, 9, 1.0), (3, 3, 1.0), (2, 2, 0.0), (2, 9, 0.0)],
)
def test_a_full_stage_far_from_the_end_waits(stages_to_end: int, held: int, wait: float) -> None:
    assert holding(stages_to_end, held).wait == pytest.approx(wait)


def test_a_backward_makes_room() -> None:
    turns = holding(4, 4)
    turns.backward()
    assert turns.wait == 0
    turns.forward()
    assert turns.wait > 0


def test_the_wait_follows_what_work_takes() -> None:
    turns = holding(4, 4, usual=10.0)
    for _ in range(40):
        turns.took(20.0)
    assert turns.wait == pytest.approx(2.0, rel=0.05)


def test_nothing_is_known_before_the_first_work_is_done() -> None:
    turns = Turns(3)
    for _ in range(5):
        turns.forward()
    assert turns.wait == 0
