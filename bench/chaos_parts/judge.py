"""What a fault cost, and what must never be seen. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.chaos_parts.weather import Deed
from mlora_worker.protocol import MANIFEST_NAME

Report = Mapping[str, Any]  # a coordinator's report as JSON
_IN_TRAINING = ("Training", "Saving", "Preempted")
_WEIGHTS_NAME = "adapter_model.safetensors"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a task in training stood just before a fault. ``stored``: step of its newest checkpoint in the store."""

    step: int
    stored: int


@dataclass(frozen=True, slots=True)
class Cost:
    """What one fault cost one task. The step that was on its way when the fault came counts as redone."""

    fault: int
    kind: str
    task: str
    before: Place
    resumed: int  # step of the checkpoint that it went on from; 0: it began anew

    @property
    def redone(self) -> int:
        return max(0, self.before.step + 1 - self.resumed)

    @property
    def given_up(self) -> int:
        """Steps that had come back, and were made again."""
        return max(0, self.before.step - self.resumed)

    def was_writing(self, every: int) -> bool:
        """A checkpoint was due and not yet in the store, as its writing takes a while, or the store was away."""
        return self.before.step // every > self.before.stored // every

    @property
    def forgot(self) -> bool:
        """It went on from an older checkpoint than was in the store."""
        return self.resumed < self.before.stored


def places(report: Report) -> dict[str, Place]:
    """Of all tasks that have steps to lose, by uid."""
    return {
        task["uid"]: Place(task["step"], task.get("checkpointStep") or 0)
        for task in report["tasks"]
        if task["phase"] in _IN_TRAINING
    }


def resumed(report: Report) -> dict[str, int | None]:
    """Where the tasks that train in this run, or have ended in it, were taken up, by uid. None: it was found finished or
    published, so this run has not even read its rows.
    """
    return {
        task["uid"]: (task.get("resumedStep") or 0) if task.get("totalSteps") else None
        for task in report["tasks"]
        if task["phase"] in ("Training", "Saving", "Succeeded")
    }


def duplicates(deeds: Iterable[Deed]) -> list[str]:
    """Adapters that were published, and then written, withdrawn or published as another one again.

    The same manifest twice is none: its first answer was lost, and the SDK asks again.
    """
    manifests: dict[str, str] = {}
    found: list[str] = []
    for deed in deeds:
        prefix, _, name = deed.key.rpartition("/")
        published = manifests.get(prefix)
        if name == MANIFEST_NAME and deed.method == "PUT":
            if published is not None and published != deed.sha256:
                found.append(f"{prefix}: another manifest")
            manifests.setdefault(prefix, deed.sha256)
        elif published is not None and name == MANIFEST_NAME:
            found.append(f"{prefix}: its manifest was removed")
        elif published is not None and name == _WEIGHTS_NAME and deed.method == "PUT":
            found.append(f"{prefix}: its weights were written again")
    return found


@dataclass(frozen=True, slots=True)
class Redone:
    """Greatest numbers of steps. ``usual``: no checkpoint was on its way when the fault came. ``writing``: one was.
    ``orderly``: steps that had come back and were lost by a drain."""

    usual: int
    writing: int
    orderly: int
    forgotten: int  # how often a newer checkpoint was in the store than the one that was taken


def redone(costs: Sequence[Cost], every: int) -> Redone:
    drains = [cost for cost in costs if cost.kind.startswith("drain")]
    others = [cost for cost in costs if not cost.kind.startswith("drain")]
    return Redone(
        usual=max((cost.redone for cost in others if not cost.was_writing(every)), default=0),
        writing=max((cost.redone for cost in others if cost.was_writing(every)), default=0),
        orderly=max((cost.given_up for cost in drains), default=0),
        forgotten=sum(cost.forgot for cost in costs),
    )
