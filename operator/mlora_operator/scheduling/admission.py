"""What the memory says of a set of tasks, and what became of each task. Pure nouns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

from mlora_operator.scheduling.order import Candidate
from mlora_worker.protocol import Failure


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes of one stage's memory, by what they are for."""

    weights: int  # frozen
    adapters: int  # with gradients and optimizer
    activations: int
    tokens: int  # whose activations are held at once

    @property
    def total(self) -> int:
        return self.weights + self.adapters + self.activations


@dataclass(frozen=True, slots=True)
class MemoryCheck:
    """Whether a set of tasks fits on every stage; the numbers are those of the tightest stage, in bytes."""

    fits: bool
    stage: int
    needed: int
    budget: int
    need: MemoryNeed | None = None  # what ``needed`` is made of


class LazyMemoryCheck(Protocol):
    """A set of tasks that was looked at. Most figures are never read, and they cost more than yes or no."""

    def check(self) -> MemoryCheck: ...


Fits = Callable[[Sequence[str]], MemoryCheck]  # uids of tasks that shall train together -> check


class AdmissionOutcome(StrEnum):
    ADMITTED = "Admitted"
    PREEMPTED = "Preempted"  # trains still and must leave at the end of its step, for ``displaced_by``
    SUSPENDED = "Suspended"  # trains still and must leave at the end of its step, as its user wishes
    WAITING = "Waiting"  # others have the memory; it is admitted by itself
    NOT_IN_PLAN = (
        "NotInPlan"  # the workers have not been told of it, since the plan is full; it comes by itself
    )
    NOT_UNDERSTOOD = "NotUnderstood"  # its workers do not know what it asks for
    NOT_SENT = "NotSent"  # its workers refuse the plan that has it, for another reason
    NEVER_FITS = "NeverFits"  # not even alone
    REFUSED = "Refused"  # it does not fit the base model, whatever the memory


class Admission(NamedTuple):
    """What became of one task. A tuple: thousands are made for a decision.

    A waiting one does not fit beside others (``lazy_check``), or stands ``behind`` another one that has waited for long, or
    comes ``after`` one that is about to leave, or fits but for what tasks that are out still hold (``lingers``), or its
    namespace has as many tasks inside as the ``limit`` says, or one trains of which nobody knows what it takes
    (``unsized``). A refused one has a ``failure``, and one that is not understood ``words``. One that must leave keeps its
    memory until the worker says that it is out (phase Preempted); from then on it is a waiting one. ``displaced_by`` is
    None when it is no more known for whom it leaves.
    """

    outcome: AdmissionOutcome
    lazy_check: LazyMemoryCheck | None = None
    behind: Candidate | None = None
    after: Candidate | None = None
    failure: Failure | None = None
    displaced_by: Candidate | None = None
    limit: int | None = None
    lingers: bool = False
    unsized: Candidate | None = None
    words: str = ""

    @property
    def check(self) -> MemoryCheck | None:
        """What the memory says of the task with those beside whom it shall fit."""
        return self.lazy_check.check() if self.lazy_check is not None else None
