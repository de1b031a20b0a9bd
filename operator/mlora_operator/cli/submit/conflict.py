"""What becomes of a task that is submitted where one of its name may be there already. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from mlora_operator.cli import exit_codes
from mlora_operator.cli.output import CommandError
from mlora_operator.cli.submit.manifests import JSON, differences, title
from mlora_operator.cli.task_table import row
from mlora_operator.manifests.names import RETRY

_SHOWN = 5  # differences in a message


class Step(StrEnum):
    """The word is what the user reads."""

    CREATE = "created"
    APPLY = "applied"
    REPLACE = "replaced"
    KEEP = "unchanged"


def tries_again(task: Mapping[str, Any]) -> bool:
    """Whether a failed task is about to run again: its annotation has another value than the operator last saw."""
    wished = (task["metadata"].get("annotations") or {}).get(RETRY)
    return wished is not None and wished != task.get("status", {}).get("retry")


def _annotated(there: JSON, wanted: JSON) -> JSON:
    """The metadata that is there with the annotations that are wanted."""
    both = [one["metadata"].get("annotations") or {} for one in (there, wanted)]
    return dict(there["metadata"]) | {"annotations": both[0] | both[1]}


def decide(wanted: JSON, there: JSON | None, *, replace: bool) -> Step:
    """What to do. Raises CommandError when only the user can decide.

    1. No task has the name, or that one is being deleted: create it (once the other is gone).
    2. The one there differs in a field that cannot be changed: with ``replace`` it is deleted and made anew; else
       refused, since nobody may lose a task by a name that was taken.
    3. It failed: with ``replace`` made anew; with a new value of the annotation ``mlora.dev/retry``, in the file or
       there, apply, and the operator lets it go on; else it stays, and so does its result.
    4. It succeeded: it stays, and nothing is trained twice.
    5. It waits or trains: apply, which changes at most its priority, whether it is suspended, and its labels.
    """
    if there is None or "deletionTimestamp" in there["metadata"]:
        return Step.CREATE
    fixed = [one for one in differences(there["spec"], wanted["spec"]) if one.immutable]
    if fixed:
        if replace:
            return Step.REPLACE
        more = f", and {len(fixed) - _SHOWN} fields more" if len(fixed) > _SHOWN else ""
        message = (
            f"{title(wanted)} exists with another spec: {'; '.join(map(str, fixed[:_SHOWN]))}{more}. "
            "Use another name (--name-suffix), or replace it (--replace), which deletes it and trains again"
        )
        raise CommandError(message, exit_codes.REFUSED)
    shown = row(there)
    if shown.failed and not tries_again(there | {"metadata": _annotated(there, wanted)}):
        return Step.REPLACE if replace else Step.KEEP
    return Step.KEEP if shown.succeeded else Step.APPLY
