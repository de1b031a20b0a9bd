"""What one report says over the one before, and whether a group moves. Pure.

Progress is a microbatch that was trained, so that a step may take as long as it takes.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import TypeVar

from mlora_operator.reconcile.state.snapshot import Contact
from mlora_worker.protocol import Report, TaskPhase, TaskReport

_Part = TypeVar("_Part")


def heard(contact: Contact, report: Report, now: datetime) -> Contact:
    """The contact after ``report`` came in at ``now``.

    Tasks stand still from the moment at which the first of them began to train, or the group started, until something
    moves; while nobody trains, nobody stands still.
    """
    before = contact.report
    if before is not None:
        report = _with_what_is_the_same(before, report)
    moved = before is not None and _moved(before, report)
    fresh = before is None or before.run_id != report.run_id
    since = None
    if _training(report):
        since = now if moved or fresh or contact.still_since is None else contact.still_since
    return replace(
        contact,
        report=report,
        lost_since=None,
        error=None,
        starting=False,
        progressed=now if moved else contact.progressed,
        still_since=since,
    )


def by_another_clock(contact: Contact, now: datetime) -> Contact:
    """The contact after the clock jumped to ``now``: how long something has lasted is not known any more, so it begins
    anew. Else all groups that train would stand still for as long as the clock went forward."""
    return replace(
        contact,
        lost_since=now if contact.lost_since is not None else None,
        still_since=now if contact.still_since is not None else None,
        progressed=None,
    )


def _with_what_is_the_same(before: Report, after: Report) -> Report:
    """``after``, in which all that says the same as before is the same object: of a thousand tasks few have moved, and a
    decision knows by that what it need not read again (``reconcile.admission.queue``)."""
    known = {task.uid: task for task in before.tasks}
    tasks = tuple(_same_or_new(known.get(task.uid), task) for task in after.tasks)
    return after.model_copy(
        update={
            "tasks": tasks,
            "facts": _same_or_new(before.facts, after.facts),
            "stages": _same_or_new(before.stages, after.stages),
        }
    )


def _same_or_new(before: _Part | None, after: _Part) -> _Part:
    return before if before is not None and before == after else after


def _moved(before: Report, after: Report) -> bool:
    """1. More microbatches were trained in the same run.
    2. A task that was in training has more steps behind it, in whichever run, or has left training.
    """
    if before.run_id == after.run_id and after.wire.microbatches > before.wire.microbatches:
        return True
    now = {task.uid: task for task in after.tasks}
    return any(
        task.uid in now
        and (
            now[task.uid].step > task.step
            or (before.run_id == after.run_id and now[task.uid].phase is not TaskPhase.TRAINING)
        )
        for task in _training(before)
    )


def _training(report: Report) -> list[TaskReport]:
    """Tasks that should move. One that waits for its store is not stuck: starting it anew would not help."""
    return [task for task in report.tasks if task.phase is TaskPhase.TRAINING and task.blocked is None]
