"""Layers to stages."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlora_worker.model.errors import TooManyStages
from mlora_worker.model.partition import split_layers


def test_equal_layers_are_spread_evenly() -> None:
    assert split_layers([1.0] * 6, 3) == (range(2), range(2, 4), range(4, 6))


def test_of_an_uneven_number_earlier_stages_get_fewer() -> None:
    assert split_layers([1.0] * 5, 2) == (range(2), range(2, 5))


def test_a_heavy_head_leaves_the_last_stage_fewer_layers() -> None:
    assert split_layers([1.0] * 30, 2, head_cost=5.0) == (range(17), range(17, 30))


def test_a_heavy_embedding_leaves_the_first_stage_fewer_layers() -> None:
    assert split_layers([1.0] * 10, 2, embed_cost=4.0) == (range(3), range(3, 10))


def test_more_stages_than_layers_are_refused_with_the_number_that_works() -> None:
    with pytest.raises(TooManyStages, match="set stages to 3 or less"):
        split_layers([1.0] * 3, 4)


costs = st.lists(st.integers(1, 9).map(float), min_size=1, max_size=9)


@given(costs, st.integers(1, 9), st.integers(0, 9), st.integers(0, 9))
def test_the_largest_stage_is_as_small_as_any_split_allows(
    cost: list[float], stages: int, embed: int, head: int
) -> None:
    stages = min(stages, len(cost))
    split = split_layers(cost, stages, embed, head)
    assert [layer for part in split for layer in part] == list(range(len(cost)))
    assert all(split)

    def largest(ends: tuple[int, ...]) -> float:
        sums = [sum(cost[a:b]) for a, b in zip((0, *ends[:-1]), ends, strict=True)]
        sums[0] += embed
        sums[-1] += head
        return max(sums)

    every = ((*cuts, len(cost)) for cuts in combinations(range(1, len(cost)), stages - 1))
    assert largest(tuple(part.stop for part in split)) == min(map(largest, every))
