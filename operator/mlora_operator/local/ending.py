"""When a local run is over, and how. Pure.

In a cluster a task may wait for ever: for a Secret, for a pipeline, for memory. Here nobody will bring what is
missing, so such a task ends the run too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from mlora_operator.api import conditions
from mlora_operator.api import pipeline as lorapipeline
from mlora_operator.api import task as loratask
from mlora_operator.reconcile.state.cause import Cause

_NONE: Mapping[str, Cause] = MappingProxyType({})
UNDECIDED_WITHIN = (
    30.0  # seconds that the operator may fail to decide about an object, before nobody waits for that
)


class Result(StrEnum):
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    REJECTED = "Rejected"  # nothing on this machine can serve it
    SUSPENDED = "Suspended"  # as its manifest says; not a failure
    ABANDONED = "Abandoned"  # its pipeline's ranks ended too often, or nothing can be decided about it


@dataclass(frozen=True, slots=True)
class End:
    """How one task ended."""

    namespace: str
    name: str
    result: Result
    cause: Cause

    @property
    def bad(self) -> bool:
        return self.result not in (Result.SUCCEEDED, Result.SUSPENDED)


def endings(
    tasks: Iterable[Mapping[str, Any]], given_up: Mapping[str, str], undecided: Mapping[str, Cause] = _NONE
) -> list[End] | None:
    """How each task ended, or None while one may still go on.

    ``given_up`` maps a pipeline (namespace/name) whose ranks are not started any more to the reason; ``undecided`` a task,
    or a pipeline, about which the operator could not decide for long (``Undecided``).
    """
    found = [_end(task, given_up, undecided) for task in tasks]
    ended = [end for end in found if end is not None]
    return ended if len(ended) == len(found) else None


class Undecided:
    """Objects about which the operator cannot decide, and since when. It tries again for ever; a run does not wait so long,
    since what raises here mostly raises always. A task that trains goes on all the same, and is waited for."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}  # by kind, namespace and name

    def lasting(self, objects: Iterable[Mapping[str, Any]], now: float) -> Mapping[str, Cause]:
        """By kind, namespace and name (``object_name``). ``now``: by a clock that only goes forward."""
        found = {object_name(one): cause for one in objects for cause in _undecided(one)}
        self._since = {name: self._since.get(name, now) for name in found}
        return {name: found[name] for name, since in self._since.items() if now - since >= UNDECIDED_WITHIN}

    def due(self, now: float) -> float | None:
        """Seconds until one has lasted so long; None where there is none."""
        left = [since + UNDECIDED_WITHIN - now for since in self._since.values()]
        return min((one for one in left if one > 0), default=None)


def object_name(one: Mapping[str, Any]) -> str:
    return _named(one["kind"], f"{one['metadata']['namespace']}/{one['metadata']['name']}")


def _named(kind: str, place: str) -> str:
    return f"{kind} {place}"


def _undecided(one: Mapping[str, Any]) -> Iterator[Cause]:
    held = {each["type"]: each for each in one.get("status", {}).get("conditions", [])}
    if held.get(conditions.RUNNING, {}).get("status") == "True":
        return
    for type_ in (conditions.ACCEPTED, conditions.READY):
        about = held.get(type_, {})
        if about.get("reason") == conditions.REASON_RECONCILE_ERROR:
            yield Cause(about["reason"], about.get("message", ""))


def _end(task: Mapping[str, Any], given_up: Mapping[str, str], undecided: Mapping[str, Cause]) -> End | None:
    status = task.get("status", {})
    held = {one["type"]: one for one in status.get("conditions", [])}

    def end(result: Result, about: Mapping[str, Any]) -> End:
        meta = task["metadata"]
        cause = Cause(about.get("reason", ""), about.get("message", ""))
        return End(meta["namespace"], meta["name"], result, cause)

    for type_, result in ((conditions.SUCCEEDED, Result.SUCCEEDED), (conditions.FAILED, Result.FAILED)):
        if held.get(type_, {}).get("status") == "True":
            return end(result, held[type_])
    if status.get("state") == "Rejected":
        accepted = held.get(conditions.ACCEPTED, {})
        refused = accepted if accepted.get("status") == "False" else held.get(conditions.ADMITTED, {})
        return end(Result.REJECTED, refused)
    if task["spec"].get("suspend"):
        return end(Result.SUSPENDED, {"reason": "Suspended", "message": "spec.suspend is true"})
    if status.get("pipeline") in given_up:
        return end(Result.ABANDONED, {"reason": "WorkersEnded", "message": given_up[status["pipeline"]]})
    meta = task["metadata"]
    for name in (
        _named(loratask.KIND, f"{meta['namespace']}/{meta['name']}"),
        _named(lorapipeline.KIND, status.get("pipeline") or ""),
    ):
        if name in undecided:
            return end(Result.ABANDONED, undecided[name]._asdict())
    return None
