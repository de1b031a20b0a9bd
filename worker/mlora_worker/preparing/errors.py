"""Errors on their way from the process that prepares rows to the rank: they arrive as what they were."""

from __future__ import annotations

from typing import Final

import mlora_worker.data.errors as of_data
import mlora_worker.storage.errors as of_stores
from mlora_worker.preparing.messages import Failed
from mlora_worker.protocol import FailureReason

_KNOWN: Final[dict[str, type[Exception]]] = {
    name: kind
    for module in (of_data, of_stores)
    for name, kind in vars(module).items()
    if isinstance(kind, type) and issubclass(kind, of_data.DataError | of_stores.StorageError)
}
_OS, _MEMORY = "OSError", "MemoryError"


class Unexpected(Exception):
    """What nothing here foresaw; its traceback is in the rank's log."""

    reason = FailureReason.INTERNAL_ERROR


def failed_message(error: BaseException) -> Failed:
    kind = next((one.__name__ for one in type(error).__mro__ if _KNOWN.get(one.__name__) is one), None)
    if kind is not None:
        return Failed(
            kind=kind,
            reason=getattr(error, "reason", None),
            seconds=error.seconds if isinstance(error, of_stores.StoreBusy) else None,
            message=_shown(str(error)),
        )
    if isinstance(error, OSError):
        return Failed(kind=_OS, number=error.errno, message=_shown(error.strerror or str(error)))
    if isinstance(error, MemoryError):
        return Failed(kind=_MEMORY, message=_shown(str(error)))
    return Failed(kind="", message=_shown(f"{type(error).__name__}: {error}"))


def error_of(failed: Failed, out_of_memory: str) -> Exception:
    """``out_of_memory``: the message where memory lacked."""
    known = _KNOWN.get(failed.kind)
    if known is not None:
        error = known.__new__(known)
        Exception.__init__(error, failed.message)
        error.reason = failed.reason or FailureReason.INTERNAL_ERROR  # type: ignore[attr-defined]
        if isinstance(error, of_stores.StoreBusy):
            error.seconds = failed.seconds or 0.0
        return error
    if failed.kind == _OS:
        return OSError(failed.number, failed.message)
    if failed.kind == _MEMORY:
        return of_data.DataError(FailureReason.OUT_OF_MEMORY, out_of_memory)
    return Unexpected(failed.message)


def _shown(text: str) -> str:
    """As UTF-8 has it: half a character would not travel."""
    return text.encode(errors="backslashreplace").decode()
