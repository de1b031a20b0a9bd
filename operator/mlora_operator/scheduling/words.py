"""What people read of a task that is not admitted, or has to leave. Pure."""

from __future__ import annotations

from functools import lru_cache

from mlora_operator.api.units import show_bytes
from mlora_operator.scheduling.admission import Admission, MemoryCheck
from mlora_operator.scheduling.order import Candidate


def too_large(admission: Admission) -> str:
    """Of a task that never fits."""
    check = admission.check
    assert check is not None
    return (
        f"the task needs {show_bytes(check.needed)} on stage {check.stage} even "
        f"alone{_made_of(check)}, of {show_bytes(check.budget)} usable: lower lora.rank, "
        "training.batchSize or training.maxSeqLength, or use a pipeline with more memory, more stages or a "
        "smaller microbatchTokens"
    )


def not_yet(admission: Admission, namespace: str) -> str:
    """Of a task of ``namespace`` that waits. Another namespace's task is not named."""
    if admission.limit is not None:
        return (
            f"{admission.limit} tasks of its namespace are already training, which is the pipeline's limit "
            f"(spec.namespaceLimits.training): it is admitted once one of them has finished"
        )
    if admission.after is not None:
        return f"the task is admitted once {_who(admission.after, namespace)} has left the pipeline"
    if admission.lingers:
        return (
            "the task fits, but tasks that have left the pipeline still use some of its memory for checkpoints or "
            "adapters that are being uploaded: it is admitted once that memory is free"
        )
    if admission.unsized is not None:
        return (
            f"the operator cannot work out how much memory {_who(admission.unsized, namespace)} takes, which trains here: "
            f"no task is admitted beside it. It ends by itself, or ask the platform team: its condition Accepted and the "
            f"operator's log have the cause"
        )
    if admission.behind is not None:
        other = _who(admission.behind, namespace)
        return f"the task waits behind {other}, which has waited longer than scheduling.holdBack"
    check = admission.check
    assert check is not None
    return _too_much(check)


@lru_cache(maxsize=10_000)
def _too_much(check: MemoryCheck) -> str:
    """Whole queues are told the same."""
    return (
        f"together with the tasks in training it would need {show_bytes(check.needed)} on stage "
        f"{check.stage}{_made_of(check)}, of {show_bytes(check.budget)} usable"
    )


def must_leave(admission: Admission, namespace: str) -> str:
    """Of a task of ``namespace`` that trains and has to leave. Another namespace's task is not named."""
    whom = _who(admission.displaced_by, namespace) if admission.displaced_by is not None else "another task"
    return f"the task is preempted by {whom}; it resumes from its checkpoint once memory is free again"


def _who(other: Candidate, namespace: str) -> str:
    return str(other) if other.namespace == namespace else "a task of another namespace"


def _made_of(check: MemoryCheck) -> str:
    need = check.need
    if need is None:
        return ""
    return (
        f" (frozen weights {show_bytes(need.weights)}, adapters {show_bytes(need.adapters)}, "
        f"activations of {need.tokens} tokens {show_bytes(need.activations)})"
    )
