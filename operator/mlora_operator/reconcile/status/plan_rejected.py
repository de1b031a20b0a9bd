"""What the workers of a pipeline do not take of what the operator sends them, as its condition. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from mlora_operator.api import conditions as c
from mlora_operator.reconcile.admission.pipeline_view import PipelineView
from mlora_operator.reconcile.state.snapshot import condition
from mlora_operator.reconcile.status.conditions import DesiredCondition

_NAMED = 3  # tasks in a message
_WAY_OUT = (
    "They are of another version than the operator: take spec.worker.image out of this pipeline, or set it to the "
    "operator's release"
)


def plan_rejected(
    view: PipelineView, refused: Mapping[str, str], whole: str | None
) -> tuple[DesiredCondition, ...]:
    """``refused``: by uid, why tasks are left out of the plan; ``whole``: why the plan is not taken as it is. Spoken of
    once it has been so; nobody knows what workers take that do not answer."""
    if whole is not None:
        words = (
            f"its workers reject the plan, so no task is admitted and those that train hear of no change: {whole}. "
            f"{_WAY_OUT}"
        )
        return (DesiredCondition(c.PLAN_REJECTED, "True", c.REASON_WORKERS_REJECT_PLAN, words),)
    if refused:
        own = view.pipeline.key.namespace
        named = [
            f"{task.key.name} ({refused[task.uid]})"
            for task in view.tasks
            if task.uid in refused and task.key.namespace == own
        ][:_NAMED]
        more = len(refused) - len(named)
        others = [f"{more} more"] if more and named else [f"{more} of other namespaces"] if more else []
        words = (
            f"its workers reject a field of {len(refused)} of its tasks, which are left out of the plan: "
            f"{', '.join((*named, *others))}. {_WAY_OUT}"
        )
        return (DesiredCondition(c.PLAN_REJECTED, "True", c.REASON_WORKERS_REJECT_TASK, words),)
    held = condition(view.pipeline.status.conditions, c.PLAN_REJECTED)
    if held is None:
        return ()
    runs = view.group is not None and view.group.replicas > 0
    if view.report is None and runs:
        return (DesiredCondition(held.type, held.status, held.reason, held.message),)
    words = "its workers take the plan" if view.report is not None else "its workers have ended"
    return (DesiredCondition(c.PLAN_REJECTED, "False", c.REASON_PLAN_ACCEPTED, words),)
