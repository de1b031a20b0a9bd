"""Which tasks travel together, and how a group's step is cut into microbatches. Pure.

Rule (paper: LoRAPP with few tasks splits mini-batches, with many tasks fuses them):

1. With n tasks on D stages there are ``L = min(n, D)`` groups; each group has one step in flight.
2. Tasks are dealt to groups by falling tokens per step, each to the group with the fewest so far (longest processing time
   first); ties go to the task that joined first and to the group with the lowest number.
3. A group's step is cut into at least N microbatches with ``(L - 1) * N >= D - 1``, so that the pipeline has no bubble;
   with one group only, into D.
4. Rows are never cut and never padded. A microbatch holds at most ``budget`` tokens, unless a single row is longer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive rows of one task within a microbatch."""

    task: str
    first_row: int
    lengths: tuple[int, ...]
    closes_step: bool


def group_tasks(tokens: Mapping[str, int], stages: int) -> tuple[tuple[str, ...], ...]:
    """Deal tasks to ``min(len(tokens), stages)`` groups, balanced by tokens per step.

    ``tokens`` maps each task to its usual tokens per step, in the order in which the tasks joined.
    Within a group the tasks stand in joining order, so that microbatches are the same in every run.
    """
    joined = {task: position for position, task in enumerate(tokens)}
    groups: list[list[str]] = [[] for _ in range(min(len(tokens), stages))]
    loads = [0] * len(groups)
    for task in sorted(tokens, key=lambda name: (-tokens[name], joined[name])):
        lightest = min(range(len(groups)), key=lambda index: (loads[index], index))
        groups[lightest].append(task)
        loads[lightest] += tokens[task]
    return tuple(tuple(sorted(group, key=joined.__getitem__)) for group in groups)


def microbatches_wanted(groups: int, stages: int) -> int:
    """Fewest microbatches a step is cut into so that ``groups`` steps in flight fill ``stages`` stages."""
    if stages == 1 or groups < 1:
        return 1
    if groups == 1:
        return stages
    return -(-(stages - 1) // (groups - 1))


def split_step(
    rows: Sequence[tuple[str, Sequence[int]]], wanted: int, budget: int
) -> tuple[tuple[Part, ...], ...]:
    """Cut one step of a group into microbatches of about equal tokens.

    ``rows``: per task the token counts of the rows of its step, in order. Returns at least ``wanted`` microbatches where
    there are rows enough, each of at most ``budget`` tokens (a longer single row travels alone). All rows appear once,
    in order; the last part of each task has ``closes_step``.
    """
    flat = [(task, ordinal, length) for task, lengths in rows for ordinal, length in enumerate(lengths)]
    total = sum(length for _, _, length in flat)
    bins: list[list[tuple[str, int, int]]] = [[]]
    filled = 0  # tokens in closed bins and the open one
    open_tokens = 0
    for index, row in enumerate(flat):
        length = row[2]
        cut_by_budget = open_tokens + length > budget
        # Close at the boundary that is nearest to an equal share, keeping rows enough for the bins still wanted.
        share = total * len(bins) / wanted
        cut_by_share = len(bins) < wanted and filled + length / 2 > share
        cut_by_count = len(bins) < wanted and len(flat) - index <= wanted - len(bins)
        if bins[-1] and (cut_by_budget or cut_by_share or cut_by_count):
            bins.append([])
            open_tokens = 0
        bins[-1].append(row)
        open_tokens += length
        filled += length
    last = {task: len(lengths) - 1 for task, lengths in rows}
    return tuple(_parts(bin_, last) for bin_ in bins if bin_)


def _parts(rows: Sequence[tuple[str, int, int]], last: Mapping[str, int]) -> tuple[Part, ...]:
    by_task: dict[str, list[tuple[int, int]]] = {}
    for task, ordinal, length in rows:
        by_task.setdefault(task, []).append((ordinal, length))
    return tuple(
        Part(task, entries[0][0], tuple(length for _, length in entries), entries[-1][0] == last[task])
        for task, entries in by_task.items()
    )
