"""A task's checkpoints, from the item in the stream to the store and back. Pure.

begun -> gathered -> stored        on its way to the store
fetched -> resumed                 on its way back into the stream
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mlora_worker.coordinator.task.outcome import PendingCheckpoint
from mlora_worker.coordinator.task.prepared import Restoration
from mlora_worker.storage.artifacts.task_state import TaskState


@dataclass(frozen=True, slots=True)
class CheckpointState:
    """A task without any checkpoint has a new one; each method gives the one that follows."""

    snapshot: PendingCheckpoint | None = None  # its parts are on their way from the stages
    state: TaskState | None = None  # the newest in memory: being uploaded, or kept for the task's return
    restoration: Restoration | None = None  # ready for the next Load
    taken_step: int = 0  # up to where a checkpoint item was issued, or the task was resumed; 0: never
    stored_step: int = 0  # of the newest complete checkpoint in the store; 0: none
    resumed_step: int | None = None

    @property
    def resumable(self) -> bool:
        return self.state is not None or self.stored_step > 0

    @property
    def newest_step(self) -> int:
        """From which the task would resume; 0: from its start."""
        return max(self.stored_step, self.state.progress.step if self.state is not None else 0)

    @property
    def is_ahead(self) -> bool:
        """The newest state is not in the store."""
        return self.state is not None and self.state.progress.step > self.stored_step

    def begun(self, snapshot: PendingCheckpoint) -> CheckpointState:
        return replace(self, snapshot=snapshot, taken_step=snapshot.progress.step)

    def gathered(self, state: TaskState) -> CheckpointState:
        """All parts are here."""
        return replace(self, snapshot=None, state=state)

    def kept(self, state: TaskState) -> CheckpointState:
        """An earlier run kept ``state`` on rank 0's volume."""
        return replace(self, state=state)

    def stored(self, step: int) -> CheckpointState:
        return replace(self, stored_step=max(self.stored_step, step))

    def found(self, step: int) -> CheckpointState:
        """The newest one in the store is of ``step``; 0: there is none."""
        return replace(self, stored_step=step)

    def fetched(self, restoration: Restoration) -> CheckpointState:
        """Without a state in memory it came from the store, whose newest step may differ from the one that was known: the
        newest file was damaged, or an earlier run was still writing. Else the task would wait for a step that never
        comes."""
        known = self if self.state is not None else self.found(restoration.progress.step)
        return replace(known, restoration=restoration)

    def resumed(self, step: int) -> CheckpointState:
        return replace(self, restoration=None, taken_step=step, resumed_step=step)

    def rolled_back(self, step: int) -> CheckpointState:
        """Nothing after ``step`` counts."""
        return replace(self, snapshot=None, taken_step=step)

    def released(self) -> CheckpointState:
        """The state is in the store: memory no longer holds it."""
        return replace(self, state=None)

    def dropped(self) -> CheckpointState:
        """The task has ended: no tensor of it is needed."""
        return replace(self, snapshot=None, state=None, restoration=None)
