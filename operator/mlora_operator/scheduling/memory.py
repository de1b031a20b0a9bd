"""The memory of one pipeline, as the scheduler asks about it. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

from mlora_operator.scheduling.admission import Fits, MemoryCheck

Held = TypeVar("Held")


class PipelineMemory(Protocol[Held]):
    """Tasks are added up one by one, so that a decision over a thousand tasks need not add up every set anew.

    ``Held`` is the sum of what some tasks ask for; nobody but the memory looks into it. A set that fits must still fit
    with a task less, and a sum must not depend on the order of its tasks. All raise KeyError for an unknown uid.
    """

    def held(self, uids: Iterable[str]) -> Held: ...

    def plus(self, held: Held, uid: str) -> Held: ...

    def fits_alone(self, uid: str) -> bool: ...

    def fits(self, held: Held) -> bool:
        """Whether ``check`` would say that it fits."""
        ...

    def fits_beside(self, held: Held, uid: str) -> bool:
        """``fits(plus(held, uid))``: what is asked most, by far."""
        ...

    def fits_already(self, held: Held) -> bool:
        """Whether what fits does so at this moment, too: tasks that are out may not have let go of all yet."""
        ...

    def check(self, held: Held) -> MemoryCheck: ...


class CheckBeside(NamedTuple, Generic[Held]):
    """A task and those beside whom it was looked at, in the memory that can say what that means."""

    memory: PipelineMemory[Held]
    held: Held
    uid: str

    def check(self) -> MemoryCheck:
        return self.memory.check(self.memory.plus(self.held, self.uid))


@dataclass(frozen=True, slots=True)
class WholeSetMemory:
    """A memory that judges whole sets: simple, and as slow as ``judge`` is."""

    judge: Fits
    judge_now: Fits | None = None  # the same with what tasks hold that are out; None: they hold nothing

    def held(self, uids: Iterable[str]) -> tuple[str, ...]:
        return tuple(uids)

    def plus(self, held: tuple[str, ...], uid: str) -> tuple[str, ...]:
        return (*held, uid)

    def fits_alone(self, uid: str) -> bool:
        return self.judge((uid,)).fits

    def fits(self, held: tuple[str, ...]) -> bool:
        return self.judge(held).fits

    def fits_beside(self, held: tuple[str, ...], uid: str) -> bool:
        return self.judge((*held, uid)).fits

    def fits_already(self, held: tuple[str, ...]) -> bool:
        return self.judge_now is None or self.judge_now(held).fits

    def check(self, held: tuple[str, ...]) -> MemoryCheck:
        return self.judge(held)
