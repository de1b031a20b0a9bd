"""What tasks had been served when they were deleted, since fair shares look back. Pure but for being changed.

A namespace that deletes each task once it is done would else look as if it had never been served, and go before all others
for ever. It is remembered as long as the operator runs: another one that starts knows of the objects that are there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

from mlora_operator.reconcile.admission.workload import served_by_status
from mlora_operator.reconcile.state.decode import parse_time
from mlora_operator.reconcile.state.snapshot import ServedTokens, Task

logger = logging.getLogger(__name__)

MOST = 100  # of a pipeline and namespace; beyond that, the oldest are counted together


class DeletedTasks:
    def __init__(self) -> None:
        self._former: Mapping[str, Task] = {}
        self._known: dict[tuple[str, str], list[ServedTokens]] = {}  # by pipeline and namespace

    def seen(
        self, tasks: Iterable[Task], pipelines: Iterable[str], now: datetime
    ) -> Mapping[str, tuple[ServedTokens, ...]]:
        """By pipeline, of the tasks that were there in a former call and are not among ``tasks``. Of pipelines that are
        there no more, nothing is kept."""
        present = {task.uid: task for task in tasks}
        former, self._former = self._former, present
        for uid in former.keys() - present.keys():
            try:
                self._note(former[uid], now)
            except Exception:  # of one that is no more, which must not end this pass and all that follow
                logger.exception("what the deleted task %s was served cannot be worked out", former[uid].key)
        there = {*pipelines}
        self._known = {key: kept for key, kept in self._known.items() if key[0] in there}
        found: dict[str, tuple[ServedTokens, ...]] = {}
        for (pipeline, _), kept in self._known.items():
            found[pipeline] = (*found.get(pipeline, ()), *kept)
        return found

    def _note(self, task: Task, now: datetime) -> None:
        status = task.status
        tokens = served_by_status(task, status)
        if status.pipeline is None or status.start_time is None or not tokens:
            return
        end = parse_time(status.completion_time) if status.completion_time else now
        kept = self._known.setdefault((status.pipeline, task.key.namespace), [])
        kept.append(ServedTokens(task.key.namespace, tokens, parse_time(status.start_time), end))
        if len(kept) > MOST:
            kept[:2] = [_together(kept[:2])]


def _together(several: Sequence[ServedTokens]) -> ServedTokens:
    """As if it had all been served evenly from the first start to the last end."""
    return ServedTokens(
        several[0].namespace,
        sum(one.tokens for one in several),
        min(one.start for one in several),
        max(one.end for one in several),
    )
