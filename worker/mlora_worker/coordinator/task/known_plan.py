"""A plan of a task beside what is known of it already, and a task whose plan is not understood. Pure."""

from __future__ import annotations

from mlora_worker.protocol import (
    Failure,
    FailureReason,
    TaskPhase,
    TaskPlan,
    TaskReport,
)


def with_what_is_known(plan: TaskPlan, former: TaskPlan) -> TaskPlan:
    """An operator that started anew may not be able to read a task's Secret or ConfigMap any more: what it cannot send
    stays as it was. So do texts that are here, or were until its rows were prepared, where it names them by digest."""
    if plan.storage.access_key is None and former.storage.access_key is not None:
        plan = plan.model_copy(update={"storage": former.storage})
    for text, digest in (("dataset_text", "dataset_digest"), ("template_text", "template_digest")):
        named, waits = getattr(plan, digest), getattr(former, digest)
        if getattr(plan, text) is not None:
            continue
        if waits is None:
            plan = plan.model_copy(update={text: getattr(former, text), digest: None})
        elif named is None:
            plan = plan.model_copy(update={digest: waits})
    if former.known_fingerprint is not None:
        plan = plan.without_rows(former.known_fingerprint)
    return plan


def not_understood(uid: str, what: str) -> TaskReport:
    message = (
        "the pipeline's workers have another version than the operator and do not support a field of the task: "
        f"{what[:1500]}. Remove it, or set spec.worker.image of the pipeline to the operator's version, and retry"
    )
    return TaskReport(
        uid=uid, phase=TaskPhase.FAILED, failure=Failure(reason=FailureReason.INVALID_SPEC, message=message)
    )
