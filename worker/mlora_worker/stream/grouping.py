"""Which tasks travel together, and how a group's step is cut into microbatches. Pure.

Tasks of a group share microbatches (BatchLoRA); groups follow one another through the pipeline (LoRAPP); a step that is cut
into several microbatches fills the pipeline when there are few groups. How many groups and how many microbatches there
shall be is decided in ``planner.py``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive rows of one task within a microbatch."""

    task: str
    first_row: int
    lengths: tuple[int, ...]
    closes_step: bool


def group_tasks(tokens: Mapping[str, int], count: int) -> tuple[tuple[str, ...], ...]:
    """Deal tasks to ``min(len(tokens), count)`` groups, balanced by tokens per step.

    ``tokens`` maps each task to its usual tokens per step, in the order in which the tasks joined. Tasks are dealt by
    falling tokens, each to the group with the fewest so far (longest processing time first: the largest group is at most
    4/3 of the least possible one; Graham, 1969). Ties go to the task that joined first and to the group with the lowest
    number. Within a group the tasks stand in joining order, so that microbatches are the same in every run.
    """
    joined = {task: position for position, task in enumerate(tokens)}
    groups: list[list[str]] = [[] for _ in range(min(len(tokens), count))]
    loads = [0] * len(groups)
    for task in sorted(tokens, key=lambda name: (-tokens[name], joined[name])):
        lightest = min(range(len(groups)), key=lambda index: (loads[index], index))
        groups[lightest].append(task)
        loads[lightest] += tokens[task]
    return tuple(tuple(sorted(group, key=joined.__getitem__)) for group in groups)


def microbatches_wanted(groups: int, stages: int) -> int:
    """Fewest equal microbatches N of each of L groups that leave no bubble on D stages: ``(L - 1) * N >= D - 1``.

    While the last microbatch of a step travels there and back, ``D - 1`` others must keep the first stage busy, and only
    the other groups have any. One group alone always leaves a bubble; it is cut into D.
    """
    if stages == 1 or groups < 1:
        return 1
    if groups == 1:
        return stages
    return -(-(stages - 1) // (groups - 1))


def split_step(
    rows: Sequence[tuple[str, Sequence[int]]], wanted: int, budget: int
) -> tuple[tuple[Part, ...], ...]:
    """Cut one step of a group into even microbatches: a pipeline runs at the pace of its widest one.

    ``rows``: per task the token counts of the rows of its step, in order. All rows appear once, in order, never cut and
    never padded; the last part of each task has ``closes_step``.

    1. There are ``wanted`` microbatches, fewer only where there are fewer rows, more only where ``budget`` asks for more.
    2. None holds more than ``budget`` tokens, unless it is a single longer row.
    3. The widest one is as narrow as rows in this order allow.
    4. The others are as close to an even share as that leaves them.
    """
    flat = [(task, ordinal, length) for task, lengths in rows for ordinal, length in enumerate(lengths)]
    last = {task: len(lengths) - 1 for task, lengths in rows}
    ends = _cut([length for _, _, length in flat], wanted, budget)
    return tuple(_parts(flat[start:end], last) for start, end in zip((0, *ends), ends, strict=False))


def _cut(lengths: Sequence[int], wanted: int, budget: int) -> tuple[int, ...]:
    """Where each microbatch ends, by the rules of ``split_step``."""
    if not lengths:
        return ()
    count = min(len(lengths), max(wanted, _fewest(lengths, budget)[0]))
    # A single row longer than the cap counts as fitting, so the least cap may lie below the longest row.
    cap = 1 + bisect_left(range(1, budget), -count, key=lambda cap: -_fewest(lengths, cap)[0])
    fewest = _fewest(lengths, cap)
    ends: list[int] = []
    start, left = 0, sum(lengths)
    for remaining in range(count, 0, -1):
        share = left / remaining
        end, filled = start + 1, lengths[start]
        while end <= len(lengths) - remaining:  # a row stays for each that follows
            wider = filled + lengths[end]
            rest_fits = fewest[end] < remaining
            if rest_fits and (wider > cap or wider - share > share - filled):
                break
            end, filled = end + 1, wider
        ends.append(end)
        start, left = end, left - filled
    return tuple(ends)


def _fewest(lengths: Sequence[int], cap: int) -> list[int]:
    """Per position, into how few microbatches of at most ``cap`` tokens the rows from there on go; 0 at the end.

    Filling each as far as it goes is best, since rows stay in order. O(rows).
    """
    count = len(lengths)
    fewest = [0] * (count + 1)
    end, filled = count, 0  # rows [start, end) are one microbatch
    for start in range(count - 1, -1, -1):
        filled += lengths[start]
        while filled > cap and end > start + 1:
            end -= 1
            filled -= lengths[end]
        fewest[start] = 1 + fewest[end]
    return fewest


def _parts(rows: Sequence[tuple[str, int, int]], last: Mapping[str, int]) -> tuple[Part, ...]:
    by_task: dict[str, list[tuple[int, int]]] = {}
    for task, ordinal, length in rows:
        by_task.setdefault(task, []).append((ordinal, length))
    return tuple(
        Part(task, entries[0][0], tuple(length for _, length in entries), entries[-1][0] == last[task])
        for task, entries in by_task.items()
    )
