"""What people read of a place that a task did not get. Pure."""

from __future__ import annotations

from functools import lru_cache

from mlora_operator.api.units import show_bytes
from mlora_operator.scheduling.admission import Place, Verdict
from mlora_operator.scheduling.order import Candidate


def too_large(place: Place) -> str:
    """Of a task that never fits."""
    verdict = place.verdict
    assert verdict is not None
    return (
        f"the task needs {show_bytes(verdict.needed)} on stage {verdict.stage} even "
        f"alone{_made_of(verdict)}, of {show_bytes(verdict.budget)} usable: lower lora.rank, "
        "training.batchSize or training.maxSeqLength, or use a pipeline with more memory, more stages or a "
        "smaller microbatchTokens"
    )


def not_yet(place: Place, namespace: str) -> str:
    """Of a task of ``namespace`` that waits. Another namespace's task is not named."""
    if place.limit is not None:
        return (
            f"{place.limit} tasks of its namespace are already training, which is the pipeline's limit "
            f"(spec.namespaceLimits.training): it is admitted once one of them has finished"
        )
    if place.after is not None:
        return f"the task is admitted once {_who(place.after, namespace)} has left the pipeline"
    if place.lingers:
        return (
            "the task fits, but tasks that have left the pipeline still use some of its memory for checkpoints or "
            "adapters that are being uploaded: it is admitted once that memory is free"
        )
    if place.behind is not None:
        return f"the task waits behind {_who(place.behind, namespace)}, which has waited longer than scheduling.holdBack"
    verdict = place.verdict
    assert verdict is not None
    return _too_much(verdict)


@lru_cache(maxsize=10_000)
def _too_much(verdict: Verdict) -> str:
    """Whole queues are told the same."""
    return (
        f"together with the tasks in training it would need {show_bytes(verdict.needed)} on stage "
        f"{verdict.stage}{_made_of(verdict)}, of {show_bytes(verdict.budget)} usable"
    )


def must_leave(place: Place, namespace: str) -> str:
    """Of a task of ``namespace`` that trains and has to give its place up. Another namespace's task is not named."""
    whom = _who(place.displaced_by, namespace) if place.displaced_by is not None else "another task"
    return f"the task is preempted by {whom}; it resumes from its checkpoint once memory is free again"


def _who(other: Candidate, namespace: str) -> str:
    return str(other) if other.namespace == namespace else "a task of another namespace"


def _made_of(verdict: Verdict) -> str:
    need = verdict.need
    if need is None:
        return ""
    return (
        f" (frozen weights {show_bytes(need.weights)}, adapters {show_bytes(need.adapters)}, "
        f"activations of {need.tokens} tokens {show_bytes(need.activations)})"
    )
