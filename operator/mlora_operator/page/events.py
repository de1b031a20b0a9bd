"""What happened to tasks lately, kept in the operator's memory: bounded, whatever comes. Pure but for its own memory."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from datetime import datetime, timedelta

from mlora_operator.reconcile.state.decision import Event

EVENTS = 16  # of a task: the newest
TASKS = 512  # whose events are kept; those of whom nothing was heard for longest go first
MESSAGE_KEPT = 500  # characters
SAME_WITHIN = timedelta(minutes=1)  # a pass whose write failed is decided once more, and says the same


@dataclass(frozen=True, slots=True)
class KeptEvent:
    at: datetime
    type: str  # Normal or Warning
    reason: str
    message: str


class TaskEvents:
    """By the task's uid. Not for several threads at once: see ``board``."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, deque[KeptEvent]] = OrderedDict()  # who was heard of last stands last

    def note(self, event: Event, at: datetime) -> None:
        """Events of pipelines are not kept: the page shows their conditions."""
        if event.kind != "LoRATask":
            return
        told = KeptEvent(at, event.type, event.reason, shortened(event.message))
        events = self._kept.setdefault(event.uid, deque(maxlen=EVENTS))
        if not any(_is_same(one, told) for one in events):
            events.append(told)
        self._kept.move_to_end(event.uid)
        if len(self._kept) > TASKS:
            self._kept.popitem(last=False)

    def of(self, uid: str) -> tuple[KeptEvent, ...]:
        """The oldest first."""
        return tuple(self._kept.get(uid, ()))


def shortened(text: str) -> str:
    return text if len(text) <= MESSAGE_KEPT else text[: MESSAGE_KEPT - 1] + "…"


def _is_same(one: KeptEvent, other: KeptEvent) -> bool:
    alike = (one.type, one.reason, one.message) == (other.type, other.reason, other.message)
    return alike and abs(other.at - one.at) < SAME_WITHIN
