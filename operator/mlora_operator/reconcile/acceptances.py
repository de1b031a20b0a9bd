"""All unfinished tasks judged together: what one may have depends on what others have. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mlora_operator.api import conditions
from mlora_operator.reconcile.accept import Acceptance, accept
from mlora_operator.reconcile.endpoints import forbidden
from mlora_operator.reconcile.limits import within_queues
from mlora_operator.reconcile.outputs import settle
from mlora_operator.reconcile.snapshot import Contact, Key, Snapshot, Task
from mlora_operator.reconcile.suitability import Suitability
from mlora_operator.settings import Settings


def acceptances(
    open_tasks: Sequence[Task], snapshot: Snapshot, settings: Settings
) -> Mapping[Key, Acceptance]:
    """1. Whether and where each is served (``accept``).
    2. Its addresses lead nowhere that only the worker can reach; one that trains or has just ended is left in peace.
    3. Its output is its own (``outputs``).
    4. Its namespace's queue there has room for it (``limits``).
    """
    suits = Suitability(open_tasks, snapshot)
    found = {task.key: accept(task, snapshot, settings.models, suits) for task in open_tasks}
    if not settings.allow_private_endpoints:
        found = {task.key: _reachable(task, found[task.key], snapshot.contacts) for task in open_tasks}
    open_keys = {task.key: task for task in open_tasks}
    everyone = [open_keys.get(task.key, task) for task in snapshot.tasks]
    found = settle(found, everyone, snapshot.pipelines)
    return within_queues(found, open_tasks, snapshot.contacts)


def _reachable(task: Task, found: Acceptance, contacts: Mapping[Key, Contact]) -> Acceptance:
    pipeline = found.pipeline
    if pipeline is None or pipeline.spec is None or task.spec is None:
        return found
    if contacts.get(pipeline.key, Contact()).keeps(task):
        return found
    problem = forbidden(task.spec, pipeline.spec.worker.allowed_networks)
    return Acceptance(conditions.REASON_ENDPOINT_NOT_ALLOWED, problem) if problem is not None else found
