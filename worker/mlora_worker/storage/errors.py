"""What can go wrong between a worker and its storage.

``StorageError``         base: has the reason that goes into the Failed condition, and a message that says
what to do
├── ``ObjectNotFound``   the object or its bucket is not there
├── ``TooLarge``         there is more of it than such a file can have
├── ``AccessRefused``    the store knows us not, or does not let us
└── ``StoreUnreachable`` no answer, or no useful one, after all retries
    ├── ``StoreBusy``    it requests a pause of a while
    └── ``UselessAnswer``  it answers, and what it says of this object is of no use

No message ever holds a key.
"""

from __future__ import annotations

from mlora_worker.protocol import FailureReason


class StorageError(Exception):
    """``str(error)`` names the object and says what to do; ``reason`` is one word for the Failed
    condition.
    """

    def __init__(self, reason: FailureReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ObjectNotFound(StorageError):
    """``reason`` is the caller's: a missing dataset is another thing than a missing output bucket."""


class AccessRefused(StorageError):
    def __init__(self, message: str) -> None:
        super().__init__(FailureReason.ACCESS_DENIED, message)


class StoreUnreachable(StorageError):
    def __init__(self, message: str) -> None:
        super().__init__(FailureReason.STORAGE_UNREACHABLE, message)


class StoreBusy(StoreUnreachable):
    """It answers, and wants to be asked again in ``seconds``."""

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message)
        self.seconds = seconds


class UselessAnswer(StoreUnreachable):
    """It answers, and what it says of this object or repository is of no use. Another try may find it better, and whoever
    wants something else from the same store is not concerned."""


class TooLarge(StorageError):
    """Nothing of it is kept: what was asked for is small, and the store goes on sending."""

    def __init__(self, uri: str, most: int) -> None:
        limit = f"{most / 2**20:g} MiB" if most >= 2**20 else f"{most} bytes"
        super().__init__(
            FailureReason.INVALID_SPEC,
            f"{uri} has more than {limit}, which is too large for such a file: remove it, or correct the address",
        )
