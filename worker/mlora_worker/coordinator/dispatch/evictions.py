"""Tasks that leave because memory ran out, and come back when there is more.

Memory may lack because others are there, because tasks that are out have not let go of all yet, or because the
process has not given back what they let go of. So a task fails for want of memory only when that has happened twice
in a row, the second time on a stage that was emptied before.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from mlora_worker.coordinator.dispatch.issuing import InStream, Issuer
from mlora_worker.coordinator.task.eviction import Eviction
from mlora_worker.coordinator.task.run import TaskRun
from mlora_worker.pipeline.faults import Fault
from mlora_worker.protocol import MemoryExhausted
from mlora_worker.runtime.log_lines import fields_of

log = logging.getLogger(__name__)

LOOK_AGAIN = 1.0  # seconds, while a task waits for memory that tasks which are out still hold
_MOST_EXHAUSTED = 8


class Evictions:
    def __init__(
        self,
        inside: InStream,
        issuer: Issuer,
        held: Callable[[], Sequence[int]],
        look_again: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        """``held`` and ``look_again``: see ``Dispatcher``."""
        self._inside, self._issuer, self._clock = inside, issuer, clock
        self._held, self._look_again, self._looks_at = held, look_again, 0.0
        self._evicted: dict[str, TaskRun] = {}
        self.exhausted: deque[MemoryExhausted] = deque(
            maxlen=_MOST_EXHAUSTED
        )  # where it ran out, newest last

    def may_pass(self, task: TaskRun, fault: Fault) -> bool:
        """Memory ran out, and waiting may mend that."""
        if not fault.out_of_memory:
            return False
        return not self.is_alone(task, fault) or self._held_on(fault.stage) > 0 or task.lacked_after is None

    def is_alone(self, task: TaskRun, fault: Fault) -> bool:
        """It was then, too: who else is there holds memory, even if it does not compute."""
        return fault.number > self._issuer.shared and all(other is task for other in self._inside)

    def make_room(self, fault: Fault, accused: Sequence[TaskRun]) -> None:
        """Memory ran out for what several tasks hold together: the newest of ``accused`` leaves, behind a checkpoint of
        what it has done, and comes back when another one has left or the operator has planned anew."""
        if len(self._inside) == 1:
            return  # it passed alone, so the fault was none of memory that others hold: it goes on
        self.evict(max(accused, key=lambda task: task.load_number), fault)

    def evict(self, task: TaskRun, fault: Fault) -> None:
        log.warning(
            "%s is evicted: stage %d ran out of memory (%s)",
            task.name,
            fault.stage,
            fault.error,
            extra=fields_of(task.plan),
        )
        together = {one.uid for one in self._inside} | {task.uid}
        held = self._held_on(fault.stage)
        former = task.eviction.waits_for if task.eviction is not None else None
        task.eviction = Eviction(max(2, len(together)), (fault.stage, held) if held else former)
        self._evicted[task.uid] = task
        if not held and self.is_alone(task, fault):
            task.lacked_after = task.progress.step
        # Told late, it may be the last one: of those that were there nothing is known any more. And where tasks that are
        # out held some, those that were there may well fit together.
        if len(together) > 1 and not held:
            self.exhausted.append(MemoryExhausted(stage=fault.stage, tasks=tuple(sorted(together))))

    def welcome_back(self) -> None:
        """Those who had to leave for want of memory, once that has changed."""
        inside = len(self._inside)
        for uid, task in list(self._evicted.items()):
            eviction = task.eviction
            if eviction is None or task.in_stream or self._waits_for_memory(task, eviction):
                continue  # it has not left yet, or has no room
            if task.withdrawn or not task.plan.admitted or inside < eviction.tasks - 1:
                task.eviction = None
                del self._evicted[uid]

    def _waits_for_memory(self, task: TaskRun, eviction: Eviction) -> bool:
        """Tasks that are out hold as much as they did when it left."""
        if eviction.waits_for is None:
            return False
        stage, held = eviction.waits_for
        if task.withdrawn or not task.plan.admitted or self._held_on(stage) < held:
            task.eviction = replace(eviction, waits_for=None)
            return False
        if self._clock() >= self._looks_at:  # nobody may tell
            self._looks_at = self._clock() + LOOK_AGAIN
            self._look_again()
        return True

    def _held_on(self, stage: int) -> int:
        held = self._held()
        return held[stage] if stage < len(held) else 0
