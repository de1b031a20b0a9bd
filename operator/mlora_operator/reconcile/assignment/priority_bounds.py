"""How high the priority of a task may be on a pipeline, who says so, and what becomes of one that is higher. Pure.

Within a namespace a priority is an agreement among its own people. What reaches other namespaces' tasks is a right that the
platform gives: in the operator's settings for all pipelines (``Rights``), and narrower in a pipeline's spec.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from mlora_operator.api import conditions
from mlora_operator.api.pipeline import LoRAPipelineSpec
from mlora_operator.api.priorities import Priorities
from mlora_operator.reconcile.state.acceptance import Acceptance
from mlora_operator.reconcile.state.cause import Cause
from mlora_operator.reconcile.state.snapshot import Task
from mlora_operator.rights import UNASKED, Rights

_CHART = "in the values of the operator's chart"


class EffectiveBound(NamedTuple):
    most: int
    source: str  # who says it, and where


def bound_of(spec: LoRAPipelineSpec, at: str, namespace: str, rights: Rights | None) -> EffectiveBound | None:
    """The highest priority that tasks of ``namespace`` may have on a pipeline of the namespace ``at``; None: any.

    1. What the settings and the pipeline say of the namespace by name. Where they do not name it: what they say of others,
       unless the pipeline is the namespace's own. Of two bounds the lower one holds.
    2. Where nobody says anything and the pipeline's policy lets priorities reach other namespaces, a task of another
       namespace than the pipeline's has at most ``UNASKED``.

    ``rights`` None: what the platform gives is not known, and the pipeline's word alone counts.
    """
    found = [*_said(spec.priorities, "spec.priorities", "of the pipeline", at, namespace)]
    if rights is not None:
        found += _said(rights.priorities, "priorities", _CHART, at, namespace)
    if found:
        return min(found, key=lambda one: one.most)
    if rights is None or at == namespace or spec.scheduling.policy == "fairShare":
        return None
    why = f"the pipeline's scheduling.policy, {spec.scheduling.policy}, lets priorities reach other namespaces' tasks"
    return EffectiveBound(
        UNASKED, f"{why}, and neither its spec.priorities nor priorities {_CHART} gives {namespace} more"
    )


def _said(
    priorities: Priorities, field: str, where: str, at: str, namespace: str
) -> Iterator[EffectiveBound]:
    own = priorities.namespaces.get(namespace)
    if own is not None:
        if own.max is not None:
            yield EffectiveBound(own.max, f"{field}.namespaces.{namespace}.max {where}")
    elif at != namespace and priorities.default.max is not None:
        yield EffectiveBound(priorities.default.max, f"{field}.default.max {where}")


def too_high(task: Task, found: Acceptance, rights: Rights) -> Cause | None:
    """Why a task is not accepted where it was ``found`` a place, or None. It can be mended in place: spec.priority may be
    changed at any time."""
    bound = _exceeded(task, found, rights)
    if bound is None:
        return None
    assert task.spec is not None
    message = f"spec.priority: {bound_message(task.spec.priority, task.key.namespace, bound)}"
    return Cause(conditions.REASON_PRIORITY_NOT_ALLOWED, message)


def bound_message(priority: int, namespace: str, bound: EffectiveBound) -> str:
    """In a user's words, that a priority is too high, and what to do."""
    return (
        f"{priority} is above {bound.most}, the most that tasks of namespace {namespace} may have here "
        f"({bound.source}): set it to {bound.most} or less, nothing else has to be done, or ask the "
        "platform team for a higher bound"
    )


def counted(task: Task, found: Acceptance, rights: Rights) -> Acceptance:
    """Of one that trains: it stays there, and its priority counts for no more than it may be."""
    bound = _exceeded(task, found, rights)
    if bound is None:
        return found
    assert task.spec is not None
    words = (
        f"{found.cause.message}; spec.priority {task.spec.priority} counts as {bound.most} while it trains, "
        f"the most that tasks of namespace {task.key.namespace} may have here ({bound.source}): set it to "
        f"{bound.most} or less, or it is not admitted again after it leaves the pipeline"
    )
    return replace(found, cause=Cause(found.cause.reason, words), priority=bound.most)


def as_counted(task: Task, found: Acceptance) -> Task:
    """With the priority that counts."""
    if found.priority is None or task.spec is None:
        return task
    return replace(task, spec=task.spec.model_copy(update={"priority": found.priority}))


def _exceeded(task: Task, found: Acceptance, rights: Rights) -> EffectiveBound | None:
    if task.spec is None:
        return None
    if found.pipeline is not None:
        spec, at = found.pipeline.spec, found.pipeline.key.namespace
    elif found.wanted is not None:
        spec, at = found.wanted.pipeline_spec(), rights.namespace
    else:
        return None
    bound = bound_of(spec, at, task.key.namespace, rights) if spec is not None else None
    return bound if bound is not None and task.spec.priority > bound.most else None
