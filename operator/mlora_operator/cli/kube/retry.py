"""Trying again when a cluster does not answer just now."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from mlora_operator.cli.kube.client import KubeError
from mlora_operator.cli.kube.cluster import NO_ANSWER

Clock = Callable[[], float]
Sleep = Callable[[float], Awaitable[None]]
T = TypeVar("T")

LONGEST_PAUSE = 5.0
_NOT_NOW = {408, 410, 429}  # and whatever begins with 5


@dataclass(frozen=True, slots=True)
class RetryTimeouts:
    """Seconds without any answer before the cluster counts as unreachable, at first and once it has answered."""

    first: float = 10.0
    later: float = 300.0


def may_pass(error: BaseException) -> bool:
    """Whether the same request may well be answered a little later."""
    if isinstance(error, KubeError):
        return error.status >= 500 or error.status in _NOT_NOW
    return isinstance(error, NO_ANSWER)


def longer(pause: float) -> float:
    return min(max(0.5, pause * 2), LONGEST_PAUSE)


async def insist(call: Callable[[], Awaitable[T]], seconds: float, now: Clock, sleep: Sleep) -> T:
    """The answer of ``call``, which may be asked twice; the last error when none came within ``seconds``."""
    end = now() + seconds
    pause = 0.0
    while True:
        try:
            return await call()
        except (KubeError, *NO_ANSWER) as error:
            if not may_pass(error) or now() > end:
                raise
        pause = longer(pause)
        await sleep(pause)
