"""What this rank did when: spans of forward, backward and update, kept in a ring and handed out on request.

Recording is always on: it costs two marks and an entry in a ring for each span, a few microseconds. On the CPU a mark is a
reading of CLOCK_MONOTONIC. On a GPU the host only queues work, so its times would say nothing: there a mark is an event in
the computing stream, and it is read when somebody asks.

Ranks of one machine share that clock. Between machines the clocks are compared when spans are asked for; the error is the
time that the question is under way and waits for its reader, usually well below a millisecond.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from typing import Any, Protocol, get_args

import torch

from mlora_worker.stream.timeline import Kind, Span

CAPACITY = 10_000  # spans that are kept of each rank


class Marks(Protocol):
    """Moments in the work of one thread."""

    clock: str  # as in ``Timeline.clock``

    def mark(self) -> Any: ...
    def passed(self, mark: Any) -> bool: ...
    def nanoseconds(self, mark: Any) -> int:
        """On this machine's CLOCK_MONOTONIC. Asked for marks that have passed, in the order of their making."""
        ...


class HostMarks:
    clock = "host"

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.mark = clock

    def passed(self, mark: int) -> bool:
        del mark
        return True

    def nanoseconds(self, mark: int) -> int:
        return mark


class DeviceMarks:
    """Events of a CUDA stream. The first one is waited for, to know when it was; the others are measured from it.

    Its clock may drift from the host's by some microseconds a second; stages on other devices have drifts of their own.
    """

    clock = "device"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known = self.mark()
        self._known.synchronize()
        self._known_at = time.monotonic_ns()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.default_stream(self._device))
        return event

    def passed(self, mark: torch.cuda.Event) -> bool:
        return bool(mark.query())  # type: ignore[no-untyped-call]

    def nanoseconds(self, mark: torch.cuda.Event) -> int:
        # From the last one that is known: a float32 of milliseconds is exact only over short times.
        self._known_at += round(self._known.elapsed_time(mark) * 1e6)
        self._known = mark
        return self._known_at


_Entry = tuple[Kind, int, tuple[str, ...], int, Any, Any]


class SpanRecorder:
    """Written by the loop's thread, read by another one, which holds the loop up as little as it can."""

    def __init__(self, stage: int, marks: Marks, capacity: int = CAPACITY) -> None:
        self._stage, self._marks = stage, marks
        self._lock = threading.Lock()
        self._open: deque[_Entry] = deque(maxlen=capacity)  # recorded; the device may not have come so far
        self._over: deque[_Entry] = deque(maxlen=capacity)  # with nanoseconds in place of the marks
        self._busy: dict[Kind, int] = dict.fromkeys(get_args(Kind), 0)  # nanoseconds of all spans

    @property
    def clock(self) -> str:
        return self._marks.clock

    @contextmanager
    def span(self, kind: Kind, number: int, tasks: tuple[str, ...], tokens: int) -> Iterator[None]:
        """Record what is done in the block."""
        start = self._marks.mark()
        try:
            yield
        finally:
            entry = (kind, number, tasks, tokens, start, self._marks.mark())
            with self._lock:
                self._open.append(entry)

    def spans(self, first: int = 0) -> tuple[Span, ...]:
        """The last ones that are over, oldest first, of microbatches from number ``first`` on."""
        with self._lock:
            self._settle()
            over = [entry for entry in self._over if entry[1] >= first]
        return tuple(
            Span(
                stage=self._stage, kind=kind, number=number, tasks=tasks, tokens=tokens, start=start, end=end
            )
            for kind, number, tasks, tokens, start, end in over
        )

    def first_of(self, newest: int) -> int:
        """The lowest number of the last ``newest`` microbatches that came back, and of the one before them: a picture of
        these has nothing of lower numbers. 0 where not so many are known."""
        with self._lock:
            self._settle()
            back = (entry[1] for entry in reversed(self._over) if entry[0] == "backward")
            numbers = list(islice(back, newest + 1))
        return min(numbers) if len(numbers) > newest else 0

    def busy(self) -> dict[Kind, float]:
        """Seconds of all spans since the start, by kind, but for those that were pushed out of the ring before anybody
        asked."""
        with self._lock:
            self._settle()
            return {kind: total / 1e9 for kind, total in self._busy.items()}

    def _settle(self) -> None:
        """Read the marks of what is over."""
        while self._open and self._marks.passed(self._open[0][-1]):
            kind, number, tasks, tokens, *marks = self._open.popleft()
            start, end = map(self._marks.nanoseconds, marks)
            self._over.append((kind, number, tasks, tokens, start, end))
            self._busy[kind] += end - start


Record = Callable[[Kind, int, tuple[str, ...], int], AbstractContextManager[None]]


def unrecorded(kind: Kind, number: int, tasks: tuple[str, ...], tokens: int) -> AbstractContextManager[None]:
    """In the place of ``SpanRecorder.span`` where nobody wants to know."""
    del kind, number, tasks, tokens
    return nullcontext()


def marks_of(device: torch.device) -> Marks:
    return DeviceMarks(device) if device.type == "cuda" else HostMarks()
