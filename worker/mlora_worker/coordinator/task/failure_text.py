"""Messages of stores and libraries, made fit for a report."""

from __future__ import annotations

from mlora_worker.protocol import Failure, FailureReason, StorageAccess, without_keys

_LONGEST_MESSAGE = 2048  # characters
_LONGEST_TEXT = 16 * _LONGEST_MESSAGE  # that credentials are looked for in


def failure_of(reason: FailureReason, message: str, access: StorageAccess) -> Failure:
    """Without credentials, and as text that any reader takes: what a store says may have half a surrogate pair in it."""
    plain = message[:_LONGEST_TEXT].encode("utf-8", "backslashreplace").decode("utf-8")
    return Failure(reason=reason, message=without_keys(plain, access)[:_LONGEST_MESSAGE])
