"""What a task's claim to its output is worth: within its namespace at once, between namespaces once it is proven. Pure.

A task may name any place as its output. So its word alone keeps only its own namespace's tasks from there; those of others
it keeps away once a worker has written there with the task's keys, which workers try before they fetch a row
(``mlora_worker/storage/artifacts/write_probe.py``). That worker must be one that the platform answers
for: a pipeline of a tenant's own runs what its tenant likes, and may say what it likes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from enum import Enum

from mlora_operator.api import conditions
from mlora_operator.reconcile.state.acceptance import Acceptance
from mlora_operator.reconcile.state.output_folders import (
    Folder,
    Folders,
    is_whole_bucket,
    may_be_whole_bucket,
    outputs_of,
)
from mlora_operator.reconcile.state.snapshot import Contact, Key, Task, condition
from mlora_operator.rights import Rights
from mlora_worker.protocol import TaskPhase

_BEYOND = (TaskPhase.TRAINING, TaskPhase.PREEMPTED, TaskPhase.SAVING, TaskPhase.SUCCEEDED)


class Proof(Enum):
    NONE = "none"  # nothing shows that it may write there
    FRESH = "fresh"  # its worker has just written there, and has not been told to train it
    HELD = "held"  # it was proven before, and may have begun


def proof(task: Task, found: Acceptance | None, contacts: Mapping[Key, Contact], rights: Rights) -> Proof:
    """What shows that the task may write to its output.

    1. Only workers of a pipeline that may serve others count: of the one that accepts it, else of the one in its status.
    2. Its status has counts of rows, and they are of that pipeline: rows are read after the output was tried.
    3. The coordinator reports it as prepared, or as beyond that.
    """
    pipeline = found.pipeline.key if found is not None and found.pipeline is not None else None
    named = task.status.pipeline
    at = str(pipeline) if pipeline is not None else named
    if at is None or not rights.serves_others(at.partition("/")[0]):
        return Proof.NONE
    if named == at and (task.succeeded or task.status.data is not None):
        return Proof.HELD
    contact = contacts.get(pipeline) if pipeline is not None else None
    reported = contact.tasks.get(task.uid) if contact is not None else None
    if contact is None or reported is None:
        return Proof.NONE
    if reported.phase is TaskPhase.PREPARED:
        return Proof.HELD if contact.sent_admissions.get(task.uid) else Proof.FRESH
    return Proof.HELD if reported.phase in _BEYOND else Proof.NONE


def learnt_of_conflict(task: Task) -> bool:
    """It was proven once, and learnt that another namespace's task has the place. No worker has it since."""
    held = condition(task.status.conditions, conditions.ACCEPTED)
    return (
        held is not None
        and held.status == "False"
        and held.reason == conditions.REASON_OUTPUT_IN_USE_BY_OTHER_NAMESPACE
    )


class OutputClaims:
    """Who has which place, as former decisions left it, so that only what has changed since is looked up."""

    def __init__(self) -> None:
        self._within = HeldFolders(lambda task: tuple((task.key.namespace, *one) for one in outputs_of(task)))
        self._between = HeldFolders(outputs_of)

    def keep(self, holders: Mapping[str, Task], proven: Mapping[str, Task]) -> None:
        """These, by uid, and no others. A whole bucket is nobody's."""
        self._within.keep(holders)
        self._between.keep(proven)

    def add(self, task: Task, *, proven: bool) -> None:
        self._within.add(task)
        if proven:
            self._between.add(task)

    def neighbour(self, task: Task) -> tuple[Task, str] | None:
        """One of the same namespace that is in the way, and where it writes. Of several, the oldest."""
        return self._within.in_the_way(task)

    def stranger(self, task: Task) -> bool:
        """Whether one of another namespace is in the way. What may be a whole bucket keeps nobody from below it."""

        def matters(other: Task, above: bool) -> bool:
            return other.key.namespace != task.key.namespace and not (above and may_be_whole_bucket(other))

        return self._between.in_the_way(task, matters) is not None


class HeldFolders:
    """Folders by holder. A question takes as many steps as its path has parts, however many folders are held."""

    def __init__(self, places: Callable[[Task], Folders]) -> None:
        self._places = places
        self._holders: dict[str, Task] = {}  # by uid
        self._at: defaultdict[Folder, set[str]] = defaultdict(set)
        self._above: defaultdict[Folder, set[str]] = defaultdict(
            set
        )  # every folder that some held one lies in

    def keep(self, holders: Mapping[str, Task]) -> None:
        for uid in self._holders.keys() - holders.keys():
            self._remove(uid)
        for uid, task in holders.items():
            before = self._holders.get(uid)
            if before is not None and before.spec is task.spec:
                self._holders[uid] = task
                continue
            if before is not None:
                self._remove(uid)
            self.add(task)

    def add(self, task: Task) -> None:
        if is_whole_bucket(task):
            return
        self._holders[task.uid] = task
        for place in self._places(task):
            self._at[place].add(task.uid)
            for length in range(1, len(place)):
                self._above[place[:length]].add(task.uid)

    def _remove(self, uid: str) -> None:
        for place in self._places(self._holders.pop(uid)):
            _take_out(self._at, place, uid)
            for length in range(1, len(place)):
                _take_out(self._above, place[:length], uid)

    def in_the_way(
        self, task: Task, matters: Callable[[Task, bool], bool] = lambda _, __: True
    ) -> tuple[Task, str] | None:
        """Of those that matter, the oldest one above, at or below the task's place, in this order, and where it writes.
        ``matters``: it is told of each whether it writes above."""
        for place in self._places(task):
            for length in range(1, len(place) + 1):
                above = length < len(place)
                found = self._oldest(self._at.get(place[:length], ()), matters, above)
                if found is not None:
                    return found, "to a folder above it" if above else "there"
            below = self._oldest(self._above.get(place, ()), matters, above=False)
            if below is not None:
                return below, "to a folder below it"
        return None

    def _oldest(self, uids: Iterable[str], matters: Callable[[Task, bool], bool], above: bool) -> Task | None:
        there = (one for uid in uids if matters(one := self._holders[uid], above))
        return min(there, key=lambda one: (one.created, one.key, one.uid), default=None)


def _take_out(where: dict[Folder, set[str]], place: Folder, uid: str) -> None:
    where[place].discard(uid)
    if not where[place]:
        del where[place]
