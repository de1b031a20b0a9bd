"""Stories of faults: what a seed names."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from bench.chaos_parts.story import MOMENTS, NODE_SHARES, QUICK, RESTORING, SHARES, tell

KILLS = {"kill_rank", "kill_coordinator", "kill_operator"}


def test_a_seed_names_one_story_and_another_seed_another() -> None:
    assert tell(56, 3) == tell(56, 3)
    assert tell(56, 3) != tell(56, 4)


@pytest.mark.parametrize("count", [20, 56, 57, 1000])
def test_every_kind_of_fault_comes_and_they_are_as_many_as_asked_for(count: int) -> None:
    story = tell(count, 1)
    assert [fault.number for fault in story] == list(range(1, count + 1))
    assert {fault.kind for fault in story} == set(SHARES)


def test_the_usual_story_has_the_shares() -> None:
    assert Counter(fault.kind for fault in tell(56, 1)) == dict(SHARES)


def test_a_story_on_a_node_has_its_own_kinds_each_as_often_as_it_says() -> None:
    assert Counter(fault.kind for fault in tell(14, 1, shares=NODE_SHARES)) == dict(NODE_SHARES)
    assert {fault.kind for fault in tell(100, 2, shares=NODE_SHARES)} == set(NODE_SHARES)


def test_fewer_faults_than_kinds_are_as_many_as_asked_for() -> None:
    assert len(tell(3, 1)) == 3


def test_the_quick_story_has_one_fault_of_each_chosen_kind() -> None:
    assert [fault.kind for fault in tell(6, 1, quick=True)] == list(QUICK)


def test_only_kills_come_before_the_world_is_well_and_neither_freezes_nor_drains_at_a_request() -> None:
    """A rank that is frozen in its start is not the operator's to find, and a drain promises nothing then."""
    for fault in tell(1000, 1):
        assert fault.kind in KILLS or not fault.hasty, fault
        assert fault.moment is None or not fault.kind.startswith(("freeze", "drain")), fault


def test_who_is_hasty_meets_ranks_that_start() -> None:
    story = tell(1000, 1)
    assert not story[0].hasty
    for former, fault in pairwise(story):
        assert not fault.hasty or former.kind.startswith(("kill_", "drain_")), (former, fault)
        assert not fault.hasty or former.kind != "kill_operator"
    assert any(fault.hasty for fault in story)


def test_a_long_story_has_every_moment() -> None:
    assert {fault.moment for fault in tell(1000, 1)} == {None, *MOMENTS, *RESTORING}
