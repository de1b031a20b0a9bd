"""What the commands show of a task, for people and for programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mlora_operator.api import conditions


@dataclass(frozen=True, slots=True)
class TaskRow:
    """What is shown of one task."""

    namespace: str
    name: str
    state: str
    reason: str
    message: str
    priority: int
    step: int
    total_steps: int
    loss: str | None
    tokens_per_second: str | None
    adapter: str | None
    succeeded: bool
    failed: bool
    eta: str | None  # time to the last step, of one that trains

    @property
    def finished(self) -> bool:
        return self.succeeded or self.failed


def row(found: Mapping[str, Any]) -> TaskRow:
    """The row of a LoRATask as the API server gives it; a status that is not there yet reads as Pending."""
    status = found.get("status", {})
    held = {one["type"]: one for one in status.get("conditions", [])}

    def true(type_: str) -> bool:
        return bool(held.get(type_, {}).get("status") == "True")

    state = status.get("state") or "Pending"
    telling = held.get(conditions.FAILED if true(conditions.FAILED) else state, {})
    return TaskRow(
        namespace=found["metadata"]["namespace"],
        name=found["metadata"]["name"],
        state=state,
        reason=status.get("reason") or telling.get("reason", ""),
        message=telling.get("message", ""),
        priority=found["spec"].get("priority", 0),
        step=status.get("step") or 0,
        total_steps=status.get("totalSteps") or 0,
        loss=status.get("loss"),
        tokens_per_second=status.get("tokensPerSecond"),
        adapter=(status.get("adapter") or {}).get("uri"),
        succeeded=true(conditions.SUCCEEDED),
        failed=true(conditions.FAILED),
        eta=status.get("eta"),
    )


def as_json(one: TaskRow) -> dict[str, Any]:
    camel = {
        "total_steps": "totalSteps",
        "tokens_per_second": "tokensPerSecond",
    }
    return {camel.get(key, key): value for key, value in asdict(one).items()}
