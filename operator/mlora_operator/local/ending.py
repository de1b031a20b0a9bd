"""When a local run is over, and how. Pure.

In a cluster a task may wait for ever: for a Secret, for a pipeline, for memory. Here nobody will bring what is
missing, so such a task ends the run too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from mlora_operator.api import conditions
from mlora_operator.reconcile.state.cause import Cause


class Result(StrEnum):
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    REJECTED = "Rejected"  # nothing on this machine can serve it
    SUSPENDED = "Suspended"  # as its manifest says; not a failure
    ABANDONED = "Abandoned"  # its pipeline's ranks ended too often


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


def endings(tasks: Iterable[Mapping[str, Any]], given_up: Mapping[str, str]) -> list[End] | None:
    """How each task ended, or None while one may still go on.

    ``given_up`` maps a pipeline (namespace/name) whose ranks are not started any more to the reason.
    """
    found = [_end(task, given_up) for task in tasks]
    ended = [end for end in found if end is not None]
    return ended if len(ended) == len(found) else None


def _end(task: Mapping[str, Any], given_up: Mapping[str, str]) -> End | None:
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
    return None
