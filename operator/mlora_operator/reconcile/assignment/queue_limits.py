"""How many tasks of one namespace may wait for a pipeline: ``spec.namespaceLimits.waiting``. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from mlora_operator.api import conditions
from mlora_operator.reconcile.state.acceptance import Acceptance
from mlora_operator.reconcile.state.cause import Cause
from mlora_operator.reconcile.state.snapshot import Contact, Key, Pipeline, Task, is_true
from mlora_operator.scheduling.order import in_order


def within_queues(
    acceptances: Mapping[Key, Acceptance], tasks: Iterable[Task], contacts: Mapping[Key, Contact]
) -> dict[Key, Acceptance]:
    """``acceptances`` without those that would make a namespace's queue at a pipeline longer than ``waiting``.

    1. Tasks that train are not in the queue.
    2. One that is in the queue stays there; of new ones the first in order gets in.
    3. What is left out is looked at again whenever something changes, so that it follows by itself.
    """
    if not any(
        one.pipeline is not None and _most_waiting(one.pipeline) is not None for one in acceptances.values()
    ):
        return dict(acceptances)
    queues: defaultdict[tuple[Key, str], list[Task]] = defaultdict(list)
    for task in tasks:
        found = acceptances.get(task.key)
        pipeline = found.pipeline if found is not None else None
        if pipeline is None or _most_waiting(pipeline) is None:
            continue
        if not contacts.get(pipeline.key, Contact()).trains(task):
            queues[pipeline.key, task.key.namespace].append(task)
    kept = dict(acceptances)
    for (_, namespace), queue in queues.items():
        pipeline = acceptances[queue[0].key].pipeline
        assert pipeline is not None
        most = _most_waiting(pipeline)
        assert most is not None
        held = [task for task in queue if is_true(task.status.conditions, conditions.ACCEPTED)]
        new = {task.uid: task for task in queue if not is_true(task.status.conditions, conditions.ACCEPTED)}
        over = list(in_order(task.candidate for task in new.values()))[max(0, most - len(held)) :]
        for one in over:
            kept[new[one.uid].key] = Acceptance(
                Cause(
                    conditions.REASON_NAMESPACE_LIMIT_REACHED,
                    f"{most} tasks of namespace {namespace} already wait for {pipeline.key}, which is its limit "
                    f"(spec.namespaceLimits.waiting): this task is accepted automatically once fewer are waiting",
                ),
            )
    return kept


def _most_waiting(pipeline: Pipeline) -> int | None:
    return pipeline.spec.namespace_limits.waiting if pipeline.spec is not None else None
