"""Whose output a folder of a store is: no two tasks write to one place, or one below the other. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from mlora_operator.api import conditions
from mlora_operator.reconcile.assignment.output_claims import OutputClaims, Proof, learnt_of_conflict, proof
from mlora_operator.reconcile.state.acceptance import Acceptance
from mlora_operator.reconcile.state.cause import Cause
from mlora_operator.reconcile.state.output_folders import (
    Folders,
    buckets_of,
    folders_in,
    inside,
    is_whole_bucket,
    levels_of,
    outputs_of,
    overlap,
)
from mlora_operator.reconcile.state.snapshot import Contact, Key, Pipeline, Task
from mlora_operator.rights import Rights
from mlora_worker import addresses

_OTHER = "choose another spec.output.uri"
_READ_SO = "which a store may read in the request that spec.storage.endpoint and addressing make of it"
MOST_LEVELS = 32  # of folders
MOST_LABELS = 16  # of a store's host


def settle(
    acceptances: Mapping[Key, Acceptance],
    tasks: Iterable[Task],
    pipelines: Iterable[Pipeline],
    contacts: Mapping[Key, Contact],
    rights: Rights,
    claims: OutputClaims | None = None,
) -> dict[Key, Acceptance]:
    """``acceptances`` of the unfinished among ``tasks``, without those whose output is not theirs.

    1. A task that is accepted holds its output, until it fails or is deleted. So does one that succeeded, as long as its
       object is there: its status says that its adapter lies there. One that is suspended and has never had a place
       holds nothing: it goes last, and is kept out as soon as somebody else has the place. Resumed, it is as if it were
       new: others that were suspended may have been accepted for the same place. A whole bucket cannot be held.
    2. Within a namespace, of several new ones, the older goes first.
    3. Between namespaces, one holds its place, and learns that another one has it, once it has proven that it may write
       there (``claims``). Of several that prove it at once, the older goes first. So no task learns more of places than its
       own keys show, and none keeps others from a place that it could not write to.
    4. Nobody writes where a pipeline keeps checkpoints or a base model, nor where its own rows are. What a pipeline keeps
       that has no right to serve others is of no concern to tasks of other namespaces: it may name any bucket.

    ``claims``: as former calls left them.
    """
    holders: dict[str, Task] = {}
    proven: dict[str, Task] = {}
    new: list[Task] = []
    contested: list[Task] = []  # accepted, and proven only now
    for task in tasks:
        if task.spec is None or task.deleting:
            continue
        holds = (
            task.succeeded if task.finished else task.accepted and not _is_idle(task) and not _was_idle(task)
        )
        if holds:
            holders[task.uid] = task
            shown = proof(task, acceptances.get(task.key), contacts, rights)
            if shown is Proof.HELD:
                proven[task.uid] = task
            elif shown is Proof.FRESH:
                contested.append(task)
        elif not task.finished:
            new.append(task)
    settled = dict(acceptances)
    if not new and not contested:  # most passes: what thousands of tasks hold is of no interest
        return settled
    claims = claims if claims is not None else OutputClaims()
    claims.keep(holders, proven)
    reserved = list(_reserved(pipelines, rights))
    for task in sorted((*new, *contested), key=lambda one: (_is_idle(one), one.created, one.key, one.uid)):
        found = acceptances[task.key]
        if found.pipeline is None and found.wanted is None:
            continue
        shown = proof(task, found, contacts, rights)
        refusal = None if task.uid in holders else _refusal(task, reserved, claims)
        if (
            refusal is None
            and (shown is not Proof.NONE or learnt_of_conflict(task))
            and claims.stranger(task)
        ):
            told = f"a task of another namespace writes to this folder, or to one above or below it: {_OTHER}"
            refusal = Cause(conditions.REASON_OUTPUT_IN_USE_BY_OTHER_NAMESPACE, f"spec.output.uri: {told}")
        if refusal is not None:
            settled[task.key] = Acceptance(refusal)
        elif not _is_idle(task):
            claims.add(task, proven=shown is not Proof.NONE)
    return settled


def misplaced(task: Task, rights: Rights) -> Cause | None:
    """Why nobody may write where the task's output is to lie, or None.

    1. A whole bucket is no output: an adapter needs its own folder in it.
    2. Below a prefix that was given to namespaces only they write, and only they above it; of several such prefixes the
       longest counts. A prefix holds for every endpoint, since one store may have many names, and for every bucket that a
       store may read in the request, since it may be read from the host's name or from the path.
    3. A place has few parts: each folder above it is looked up, for each task in each pass.
    """
    assert task.spec is not None
    endpoint, uri = task.spec.storage.endpoint, task.spec.output.uri
    levels = levels_of(task)
    if levels > MOST_LEVELS:
        return Cause(
            conditions.REASON_INVALID_SPEC,
            f"spec.output.uri: it has {levels} levels of folders, those of spec.storage.endpoint included, and "
            f"{MOST_LEVELS} are allowed: use a shorter path in a new task",
        )
    if endpoint is not None and addresses.endpoint(endpoint).host.count(".") >= MOST_LABELS:
        return Cause(
            conditions.REASON_INVALID_SPEC,
            f"spec.storage.endpoint: its host's name has more than {MOST_LABELS} parts: use a shorter name in a new task",
        )
    if is_whole_bucket(task):
        return Cause(
            conditions.REASON_INVALID_SPEC,
            "spec.output.uri: it is a whole bucket: add a prefix for this adapter, such as "
            f"s3://{addresses.s3(uri).bucket}/{task.key.name}, in a new task",
        )
    written = addresses.place(uri)
    for place in buckets_of(task, rights.buckets):
        owners = rights.owners_of(place)
        if owners is not None and task.key.namespace not in owners:
            own = ", ".join(rights.prefixes_of(task.key.namespace))
            instead = f"choose one below {own}" if own else _OTHER
            meant = "this prefix" if place == written else f"s3://{'/'.join(place[1:])}, {_READ_SO},"
            return Cause(
                conditions.REASON_OUTPUT_NOT_ALLOWED,
                f"spec.output.uri: the platform team has reserved {meant} for other namespaces (outputs.prefixes): "
                f"{instead}",
            )
    return None


def _is_idle(task: Task) -> bool:
    """It is suspended and has never had a place, so that nothing of it lies anywhere."""
    return task.spec is not None and task.spec.suspend and task.status.start_time is None


def _was_idle(task: Task) -> bool:
    """It was so when its status was last written."""
    held = task.admitted
    return held is not None and held.reason == conditions.REASON_SUSPENDED and task.status.start_time is None


def _refusal(task: Task, reserved: Iterable[_Reserved], claims: OutputClaims) -> Cause | None:
    message = _overlaps(task, reserved)
    neighbour = claims.neighbour(task) if message is None else None
    if neighbour is not None:
        message = _says(*neighbour)
    return None if message is None else Cause(conditions.REASON_OUTPUT_IN_USE, f"spec.output.uri: {message}")


def _says(other: Task, where: str) -> str:
    if other.finished:
        done = "the adapter" if where == "there" else f"an adapter that was written {where}"
        return f"task {other.key.name} has {done}: delete that task, or {_OTHER}"
    return f"task {other.key.name} writes {where}: delete that task, or {_OTHER}"


@dataclass(frozen=True, slots=True)
class _Reserved:
    """``above``: it may not even lie below an output. ``against``: the one namespace whose tasks it concerns; None: all."""

    folders: Folders
    what: str
    above: bool
    against: str | None


def _overlaps(task: Task, reserved: Iterable[_Reserved]) -> str | None:
    assert task.spec is not None
    places = outputs_of(task)
    for one in reserved:
        if one.against is not None and one.against != task.key.namespace:
            continue
        if inside(places, one.folders) or (one.above and overlap(places, one.folders)):
            return f"it overlaps with the folder where a pipeline keeps {one.what}: {_OTHER}"
    for uri in task.spec.dataset.addresses:
        rows = folders_in(task.spec.storage, uri)
        if inside(rows, places) or ("*" not in uri and inside(places, rows)):
            return f"it overlaps with the rows at {uri}, which the adapter's files could replace: {_OTHER}"
    return None


def _reserved(pipelines: Iterable[Pipeline], rights: Rights) -> Iterator[_Reserved]:
    for pipeline in pipelines:
        if pipeline.spec is None:
            continue
        own = pipeline.key.namespace
        against = None if rights.serves_others(own) else own
        storage, checkpoints = pipeline.spec.storage, pipeline.spec.checkpoints.uri
        if checkpoints is not None:
            yield _Reserved(folders_in(storage, checkpoints), "checkpoints", True, against)
        yield _Reserved(folders_in(storage, pipeline.spec.model.uri), "a base model", False, against)
