"""Who gets a place in a pipeline's memory. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from mlora_operator.scheduling.order import Candidate, in_order
from mlora_worker.protocol import Failure


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes of one stage's memory, by what they are for."""

    weights: int  # frozen
    adapters: int  # with gradients and optimizer
    activations: int
    tokens: int  # whose activations are held at once

    @property
    def total(self) -> int:
        return self.weights + self.adapters + self.activations


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a set of tasks fits on every stage; the numbers are those of the tightest stage, in bytes."""

    fits: bool
    stage: int
    needed: int
    budget: int
    need: Need | None = None  # what ``needed`` is made of


Fits = Callable[[Sequence[str]], Verdict]  # uids of tasks that shall train together -> verdict


class Outcome(StrEnum):
    ADMITTED = "Admitted"
    PREEMPTED = "Preempted"  # trains still and must leave at the end of its step, for ``displaced_by``
    SUSPENDED = "Suspended"  # trains still and must leave at the end of its step, as its user wishes
    WAITING = "Waiting"  # others have the memory; the place comes by itself
    NEVER_FITS = "NeverFits"  # not even alone
    REFUSED = "Refused"  # it does not fit the base model, whatever the memory


@dataclass(frozen=True, slots=True)
class Place:
    """What became of one task. A waiting one does not fit (``verdict``) or stands ``behind`` another one; a refused one
    has a ``failure``. One that must leave keeps its memory until the worker says that it is out (phase Preempted); from
    then on it is a waiting one. ``displaced_by`` is None when it must leave and it is no more known for whom.
    """

    outcome: Outcome
    verdict: Verdict | None = None
    behind: Candidate | None = None
    failure: Failure | None = None
    displaced_by: Candidate | None = None


def admit(waiting: Iterable[Candidate], running: Iterable[Candidate], fits: Fits) -> Mapping[str, Place]:
    """The place of each task, by uid.

    1. Tasks that run keep their place (``keep_running``).
    2. A waiting task that does not fit even alone never will: it is told so and stands in nobody's way.
    3. The other waiting tasks are taken in order, each admitted when it fits beside all that are admitted.
    4. The first that does not fit waits, and so does everyone behind it. Nobody overtakes: else small tasks
       could keep a large one out for ever.

    ``fits`` must be monotone: a set that fits still fits with a task less.
    """
    places: dict[str, Place] = {}
    kept = keep_running(in_order(running))
    places |= {task.uid: Place(Outcome.ADMITTED) for task in kept}
    admitted = [task.uid for task in kept]
    first_that_waits: Candidate | None = None
    for task in in_order(waiting):
        alone = fits([task.uid])
        if not alone.fits:
            places[task.uid] = Place(Outcome.NEVER_FITS, alone)
        elif first_that_waits is not None:
            places[task.uid] = Place(Outcome.WAITING, behind=first_that_waits)
        else:
            together = fits([*admitted, task.uid])
            if together.fits:
                admitted.append(task.uid)
                places[task.uid] = Place(Outcome.ADMITTED)
            else:
                first_that_waits = task
                places[task.uid] = Place(Outcome.WAITING, together)
    return places


def keep_running(running: Sequence[Candidate]) -> Sequence[Candidate]:
    """Of the running tasks, in order, those that keep their place: all. The one place to decide otherwise."""
    return running
