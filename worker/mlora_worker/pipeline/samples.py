"""The newest samples of each stage's memory, as many as a report may carry. Pure."""

from __future__ import annotations

from collections import deque

from mlora_worker.protocol import MemorySample

MOST_PER_STAGE = 48
_CALIBRATION = 8  # of these, at most: they are made once


class SampleBook:
    """Not thread-safe. The calibration's samples stay beside the newest ones: they have widths of their own."""

    def __init__(self, stages: int) -> None:
        self._first: list[deque[MemorySample]] = [deque(maxlen=_CALIBRATION) for _ in range(stages)]
        self._newest: list[deque[MemorySample]] = [
            deque(maxlen=MOST_PER_STAGE - _CALIBRATION) for _ in range(stages)
        ]

    def add(self, sample: MemorySample) -> None:
        (self._first if sample.calibration else self._newest)[sample.stage].append(sample)

    def all(self) -> tuple[MemorySample, ...]:
        """Of each stage the oldest first."""
        return tuple(
            sample
            for first, newest in zip(self._first, self._newest, strict=True)
            for sample in (*first, *newest)
        )
