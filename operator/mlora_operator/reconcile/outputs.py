"""Whose output a folder of a store is: no two tasks write to one place, or one below the other. Pure.

Compared is where addresses lead, as far as that can be read off them: see ``folder``. One store under two host names is two
stores here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from mlora_operator.api import conditions
from mlora_operator.reconcile.accept import Acceptance
from mlora_operator.reconcile.snapshot import Key, Pipeline, Task
from mlora_operator.rights import Rights
from mlora_worker import addresses

Folder = tuple[str, ...]  # the store, then the parts of the path; for S3 the bucket is the first of them

_AWS = "aws"
_OTHER = "choose another spec.output.uri"


@lru_cache(maxsize=50_000)
def folder(endpoint: str | None, uri: str) -> Folder:
    """Where ``uri`` leads, as whoever reads or writes there understands it (``mlora_worker.addresses``). The same for
    endpoints that differ in the case of the host, in a port that is the scheme's own anyway, and in the cluster's suffix
    of a Service's name; and for all of AWS, whose buckets have one name each. Of the web and of hubs, each address is a
    place of its own: nothing is written there.
    """
    if not uri.startswith(("s3://", "file://")):
        return ("elsewhere", uri)
    kind, *parts = addresses.place(uri)
    return (_store(endpoint) if kind == "s3" else kind), *parts


def overlap(one: Folder, other: Folder) -> bool:
    """Equal, or one lies in the other."""
    shorter = min(len(one), len(other))
    return one[:shorter] == other[:shorter]


def settle(
    acceptances: Mapping[Key, Acceptance],
    tasks: Iterable[Task],
    pipelines: Iterable[Pipeline],
    rights: Rights,
    held: Held | None = None,
) -> dict[Key, Acceptance]:
    """``acceptances`` of the unfinished among ``tasks``, without those whose output is not theirs.

    1. A task that is accepted holds its output, until it fails or is deleted. So does one that succeeded, as long as its
       object is there: its status says that its adapter lies there. One that is suspended and has never had a place
       holds nothing: it goes last, and is kept out as soon as somebody else has the place. Resumed, it is as if it were
       new: others that were suspended may have been accepted for the same place.
    2. Of several new ones, the older goes first.
    3. Nobody writes where a pipeline keeps checkpoints or a base model, nor where its own rows are. What a pipeline keeps
       that has no right to serve others is of no concern to tasks of other namespaces: it may name any bucket.

    Another namespace's task is not named: who may write where is no affair of a stranger's. ``held``: as former calls left
    it, so that only what has changed since is looked up.
    """
    holders: dict[str, Task] = {}
    new: list[Task] = []
    for task in tasks:
        if task.spec is None or task.deleting:
            continue
        if task.finished:
            if task.succeeded:
                holders[task.uid] = task
        elif task.accepted and not _is_idle(task) and not _was_idle(task):
            holders[task.uid] = task
        else:
            new.append(task)
    settled = dict(acceptances)
    if not new:  # most passes: what thousands of tasks hold is of no interest
        return settled
    held = held if held is not None else Held()
    held.keep(holders)
    reserved = list(_reserved(pipelines, rights))
    for task in sorted(new, key=lambda one: (_is_idle(one), one.created, one.key, one.uid)):
        found = acceptances[task.key]
        if found.pipeline is None and found.wanted is None:
            continue
        message = _misplaced(task, reserved) or held.in_the_way(task)
        if message is None:
            if not _is_idle(task):
                held.add(task)
        else:
            told = f"spec.output.uri: {message}"
            settled[task.key] = Acceptance(conditions.REASON_OUTPUT_IN_USE, told)
    return settled


def _is_idle(task: Task) -> bool:
    """It is suspended and has never had a place, so that nothing of it lies anywhere."""
    return task.spec is not None and task.spec.suspend and task.status.start_time is None


def _was_idle(task: Task) -> bool:
    """It was so when its status was last written."""
    held = task.admitted
    return held is not None and held.reason == conditions.REASON_SUSPENDED and task.status.start_time is None


class Held:
    """Folders by holder. A question takes as many steps as its path has parts, however many folders are held."""

    def __init__(self) -> None:
        self._holders: dict[str, Task] = {}  # by uid
        self._at: defaultdict[Folder, set[str]] = defaultdict(set)
        self._above: defaultdict[Folder, set[str]] = defaultdict(
            set
        )  # every folder that some held one lies in

    def keep(self, holders: Mapping[str, Task]) -> None:
        """These, by uid, and no others."""
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
        self._holders[task.uid] = task
        place = _output(task)
        self._at[place].add(task.uid)
        for length in range(1, len(place)):
            self._above[place[:length]].add(task.uid)

    def _remove(self, uid: str) -> None:
        place = _output(self._holders.pop(uid))
        _take_out(self._at, place, uid)
        for length in range(1, len(place)):
            _take_out(self._above, place[:length], uid)

    def in_the_way(self, task: Task) -> str | None:
        """Of several holders, the oldest is named."""
        place = _output(task)
        for length in range(1, len(place) + 1):
            at = self._at.get(place[:length])
            if at:
                return _says(
                    task, self._oldest(at), "there" if length == len(place) else "to a folder above it"
                )
        below = self._above.get(place)
        return _says(task, self._oldest(below), "to a folder below it") if below else None

    def _oldest(self, uids: Iterable[str]) -> Task:
        return min((self._holders[uid] for uid in uids), key=lambda one: (one.created, one.key, one.uid))


def _take_out(where: dict[Folder, set[str]], place: Folder, uid: str) -> None:
    where[place].discard(uid)
    if not where[place]:
        del where[place]


def _says(task: Task, other: Task, where: str) -> str:
    if other.key.namespace != task.key.namespace:
        return f"another task writes {where}: {_OTHER}"
    if other.finished:
        done = "the adapter" if where == "there" else f"an adapter that was written {where}"
        return f"task {other.key.name} has {done}: delete that task, or {_OTHER}"
    return f"task {other.key.name} writes {where}: delete that task, or {_OTHER}"


@dataclass(frozen=True, slots=True)
class _Reserved:
    """``above``: it may not even lie below an output. ``against``: the one namespace whose tasks it concerns; None: all."""

    folder: Folder
    what: str
    above: bool
    against: str | None


def _misplaced(task: Task, reserved: Iterable[_Reserved]) -> str | None:
    assert task.spec is not None
    place = _output(task)
    for one in reserved:
        if one.against is not None and one.against != task.key.namespace:
            continue
        inside = place[: len(one.folder)] == one.folder
        if inside or (one.above and overlap(place, one.folder)):
            return f"it overlaps with the folder where a pipeline keeps {one.what}: {_OTHER}"
    for uri in task.spec.dataset.addresses:
        rows = folder(task.spec.storage.endpoint, uri)
        if rows[: len(place)] == place or ("*" not in uri and place[: len(rows)] == rows):
            return f"it overlaps with the rows at {uri}, which the adapter's files could replace: {_OTHER}"
    return None


def _reserved(pipelines: Iterable[Pipeline], rights: Rights) -> Iterator[_Reserved]:
    for pipeline in pipelines:
        if pipeline.spec is None:
            continue
        own = pipeline.key.namespace
        against = None if rights.serves_others(own) else own
        endpoint, checkpoints = pipeline.spec.storage.endpoint, pipeline.spec.checkpoints.uri
        if checkpoints is not None:
            yield _Reserved(folder(endpoint, checkpoints), "checkpoints", True, against)
        yield _Reserved(folder(endpoint, pipeline.spec.model.uri), "a base model", False, against)


def _output(task: Task) -> Folder:
    assert task.spec is not None
    return folder(task.spec.storage.endpoint, task.spec.output.uri)


def _store(endpoint: str | None) -> str:
    if endpoint is None:
        return _AWS
    site = addresses.endpoint(endpoint)
    host = site.host.removesuffix(".cluster.local").removesuffix(".svc")
    if host.endswith((".amazonaws.com", ".amazonaws.com.cn")) and host.startswith(("s3.", "s3-")):
        return _AWS
    return f"{host}:{site.port}{site.path}"
