"""Data that cannot be trained on."""

from __future__ import annotations

from mlora_worker.protocol import FailureReason


class DataError(Exception):
    """``str(error)`` names the rows and says what to do; ``reason`` is one word for the Failed condition."""

    def __init__(self, reason: FailureReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Interrupted(DataError):
    """What broke off may be the machine's fault, such as a process that was killed for want of memory: a further try may
    go well. If none does, it is the data's fault after all, with this reason and these words."""
