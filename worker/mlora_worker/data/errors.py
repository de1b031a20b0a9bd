"""Data that cannot be trained on."""

from __future__ import annotations

from mlora_worker.protocol import FailureReason


class DataError(Exception):
    """``str(error)`` names the rows and says what to do; ``reason`` is one word for the Failed condition."""

    def __init__(self, reason: FailureReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
