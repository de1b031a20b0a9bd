"""A plan, as far as this worker understands it.

An operator may be newer than a pipeline's workers: while they finish what they train before they are replaced, or for as
long as the pipeline names an image of its own. Then one task may say what they do not know. That is no business of the
others, whose plan is taken as ever; nor may the field be passed over, for the task would be trained into something else.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from mlora_worker.protocol import Plan, TaskPlan


@dataclass(frozen=True, slots=True)
class ParsedPlan:
    plan: Plan
    unsupported: Mapping[str, str] = field(
        default_factory=dict
    )  # what is not understood, by uid of tasks left out


def parse_plan(body: bytes) -> ParsedPlan:
    """Raises ``ValidationError`` for what is wrong with the plan as a whole, or with a task that does not say who it is."""
    try:
        return ParsedPlan(Plan.model_validate_json(body))
    except ValidationError as whole:
        raw = _without_tasks(body)
        if raw is None:
            raise
        rest, tasks = raw
        good: list[TaskPlan] = []
        unsupported: dict[str, str] = {}
        for one in tasks:
            try:
                good.append(TaskPlan.model_validate_json(json.dumps(one)))
            except ValidationError as error:
                if not _says_who_it_is(one):
                    raise whole from None
                unsupported[one["uid"]] = without_values(error)
        plan = Plan.model_validate_json(json.dumps({**rest, "tasks": []}))
        return ParsedPlan(plan.model_copy(update={"tasks": tuple(good)}), unsupported)


def without_values(error: ValidationError) -> str:
    """Which fields are wrong, but never their values: a plan carries keys. At most ten."""
    lines = [f"{'.'.join(str(part) for part in item['loc'])}: {_words(item)}" for item in error.errors()]
    return "; ".join(lines[:10])


def _words(problem: Mapping[str, Any]) -> str:
    return "unknown field" if problem["type"] == "extra_forbidden" else str(problem["msg"])


def _without_tasks(body: bytes) -> tuple[dict[str, Any], Iterable[Any]] | None:
    try:
        raw = json.loads(body)
    except ValueError:
        return None
    if not isinstance(raw, dict) or not isinstance(raw.get("tasks"), list):
        return None
    return raw, raw["tasks"]


def _says_who_it_is(task: Any) -> bool:
    names = [task.get(name) for name in ("uid", "namespace", "name")] if isinstance(task, dict) else [None]
    return all(isinstance(one, str) and one for one in names)
