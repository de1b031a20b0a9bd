"""Why something is as it is: one word for programs, and a message for people. Pure."""

from __future__ import annotations

from typing import NamedTuple

from mlora_operator.api import conditions


class Cause(NamedTuple):
    """What a condition says beside its type and status; of a pod, in the words of the scheduler or the kubelet."""

    reason: str
    message: str

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}".rstrip(": ")

    @property
    def unread(self) -> bool:
        """Something could not be read: nobody knows whether it is missing."""
        return self.reason == conditions.REASON_READ_ERROR
