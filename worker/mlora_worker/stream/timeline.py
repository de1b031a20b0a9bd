"""What happened when on which stage: one form for simulated and for measured runs, and what can be read off it. Pure.

Times are integer nanoseconds on one clock, so that equal moments are equal. The zero of the clock means nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

from pydantic import Field, model_validator

from mlora_worker.bounds import MOST_STAGES, MOST_TASKS, Amount, LongName, Stage, Whole, Word, at_most
from mlora_worker.protocol import Message

Kind = Literal["forward", "backward", "update", "evaluate"]
MOST_SPANS = 2**20


class Span(Message):
    """One stage was busy with one thing from ``start`` to ``end`` (nanoseconds)."""

    stage: Stage
    kind: Kind
    number: Whole  # of the microbatch; for an update, of the item that it came with
    # uids, in the order of the microbatch's segments
    tasks: Annotated[tuple[Word, ...], Field(max_length=MOST_TASKS, fail_fast=True)]
    tokens: Amount
    start: Whole
    end: Whole

    @property
    def duration(self) -> int:
        return self.end - self.start


class Timeline(Message):
    """Spans of all stages of one pipeline. ``GET /v1/timeline`` answers with it."""

    stages: Annotated[int, Field(strict=True, ge=0, le=MOST_STAGES)]
    spans: Annotated[tuple[Span, ...], Field(max_length=MOST_SPANS, fail_fast=True)]
    # uid -> what to show of a task, where it is not the uid
    names: Annotated[dict[Word, LongName], Field(max_length=MOST_TASKS), at_most(MOST_TASKS)] = Field(
        default={}
    )
    clock: Word = "simulated"  # what the times are: simulated, host or device

    @model_validator(mode="after")
    def _is_of_these_stages(self) -> Timeline:
        far = max((span.stage for span in self.spans), default=-1)
        if far >= self.stages:
            raise ValueError(f"spans: one is of stage {far}, and there are {self.stages} stages")
        return self

    def name(self, task: str) -> str:
        return self.names.get(task, task)


def started(spans: Iterable[Span]) -> int:
    """First start of any span; 0 when there is none."""
    return min((span.start for span in spans), default=0)


def ended(spans: Iterable[Span]) -> int:
    """Last end of any span; 0 when there is none."""
    return max((span.end for span in spans), default=0)


def makespan(timeline: Timeline) -> int:
    """Nanoseconds from the first start to the last end."""
    return ended(timeline.spans) - started(timeline.spans)


def busy(timeline: Timeline, start: int, end: int) -> tuple[int, ...]:
    """Per stage the nanoseconds between ``start`` and ``end`` in which it computed."""
    totals = [0] * timeline.stages
    for span in timeline.spans:
        totals[span.stage] += max(0, min(span.end, end) - max(span.start, start))
    return tuple(totals)


def bubbles(timeline: Timeline, start: int | None = None, end: int | None = None) -> tuple[float, ...]:
    """Per stage the share of the time between ``start`` and ``end`` in which it did nothing; by default of the makespan."""
    start = started(timeline.spans) if start is None else start
    end = ended(timeline.spans) if end is None else end
    if end <= start:
        return (0.0,) * timeline.stages
    return tuple(1 - one / (end - start) for one in busy(timeline, start, end))


def bubble(timeline: Timeline, start: int | None = None, end: int | None = None) -> float:
    """Share of all stages' time together in which they did nothing."""
    shares = bubbles(timeline, start, end)
    return sum(shares) / len(shares)


def peak_microbatches(timeline: Timeline) -> tuple[int, ...]:
    """Per stage the most microbatches whose activations it held at once, from a forward's start to its backward's end."""
    return _peak(timeline, [1] * len(timeline.spans))


def peak_tokens(timeline: Timeline) -> tuple[int, ...]:
    """Per stage the most tokens whose activations it held at once."""
    return _peak(timeline, [span.tokens for span in timeline.spans])


def _peak(timeline: Timeline, sizes: Sequence[int]) -> tuple[int, ...]:
    # At the same moment, what ends is let go before what starts is taken.
    changes: list[list[tuple[int, int]]] = [[] for _ in range(timeline.stages)]
    for span, size in zip(timeline.spans, sizes, strict=True):
        if span.kind == "forward":
            changes[span.stage].append((span.start, size))
        elif span.kind == "backward":
            changes[span.stage].append((span.end, -size))
    peaks = []
    for stage in changes:
        held = peak = 0
        for _, change in sorted(stage):
            held += change
            peak = max(peak, held)
        peaks.append(peak)
    return tuple(peaks)


def returns(timeline: Timeline) -> tuple[int, ...]:
    """When microbatches came back to rank 0, in order: the ends of the first stage's backwards."""
    return tuple(sorted(span.end for span in timeline.spans if span.kind == "backward" and span.stage == 0))


def window_of_microbatches(timeline: Timeline, first: int, count: int) -> tuple[int, int]:
    """From the return of the ``first`` microbatch (0-based) to the return of the one that is ``count`` later.

    In a steady state whose pattern repeats every ``count`` microbatches, what is read off this window does not depend on
    ``first``. Raises ``ValueError`` when so many never came back.
    """
    moments = returns(timeline)
    if first + count >= len(moments):
        raise ValueError(f"{len(moments)} microbatches came back, {first + count + 1} are needed")
    return moments[first], moments[first + count]


def excerpt(timeline: Timeline, start: int, end: int) -> Timeline:
    """The spans that touch the time between ``start`` and ``end``, cut to it."""
    spans = tuple(
        span.model_copy(update={"start": max(span.start, start), "end": min(span.end, end)})
        for span in timeline.spans
        if span.end > start and span.start < end
    )
    return timeline.model_copy(update={"spans": spans})


def typical(timeline: Timeline, microbatches: int) -> Timeline:
    """A piece that a picture can show: so many microbatches, until three quarters of the recorded ones were back.

    The whole of it where there are not more.
    """
    moments = returns(timeline)
    if len(moments) <= microbatches:
        return timeline
    last = max(microbatches, len(moments) * 3 // 4)
    return excerpt(timeline, moments[last - microbatches], moments[last])


def latest(timeline: Timeline, microbatches: int) -> Timeline:
    """The newest piece: from the return of the microbatch that came back so many before the last one, to the last one's.

    The whole of it where there are not more.
    """
    moments = returns(timeline)
    if len(moments) <= microbatches:
        return timeline
    return excerpt(timeline, moments[-microbatches - 1], moments[-1])
