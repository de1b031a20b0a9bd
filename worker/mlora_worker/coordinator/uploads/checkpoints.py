"""Checkpoints on rank 0: the stages' parts joined, written and fetched in the background, and kept in memory until safe.

A state that could not be written stays in memory and on rank 0's own volume, and is tried again; a newer one takes its
place. That of a task which
waits for its return stays too, as long as there is room (``KEPT_BYTES``), and spares it the way to the store.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from pathlib import Path

from mlora_worker.coordinator.metrics import Meter, NullMeter
from mlora_worker.coordinator.task.history import History
from mlora_worker.coordinator.task.outcome import PendingCheckpoint
from mlora_worker.coordinator.task.prepared import Restoration
from mlora_worker.coordinator.task.run import TaskRun
from mlora_worker.coordinator.uploads.retrier import Attempt, UploadRetrier, Withdrawn, WorkPool
from mlora_worker.coordinator.uploads.store_identity import output_store
from mlora_worker.pipeline.results import OutOfOrder, StageState
from mlora_worker.protocol import FailureReason, Optimizer, StageReport, TaskPhase, TaskPlan
from mlora_worker.storage.artifacts.agreement import check_progress
from mlora_worker.storage.artifacts.aside import Aside
from mlora_worker.storage.artifacts.checkpoint import (
    SavedState,
    delete_checkpoints,
    newest_progress,
    newest_state,
    save_state,
    stage_part,
    write_saved,
)
from mlora_worker.storage.artifacts.local_spool import LocalSpool
from mlora_worker.storage.artifacts.task_state import CheckpointMismatch, Fingerprint, TaskState, Wanted
from mlora_worker.storage.errors import StorageError
from mlora_worker.storage.object_store.scratch import scratch_folder
from mlora_worker.storage.object_store.store import Store

log = logging.getLogger(__name__)

OpenCheckpoints = Callable[
    [TaskPlan], tuple[Store, str]
]  # where a task's checkpoints lie, opened with the newest keys

ShapesOf = Callable[[TaskPlan], Mapping[str, tuple[int, ...]]]  # of the tensors in its adapter's file

KEPT_BYTES = 2**30  # of tasks that wait for their return, in rank 0's memory


class CheckpointTransfer:
    """``changed`` guards the tasks' state. ``on_change`` is called with it held. Nothing here blocks but in a pool."""

    def __init__(
        self,
        *,
        stages: Sequence[StageReport],
        tasks: Mapping[str, TaskRun],
        open_checkpoints: OpenCheckpoints,
        pool: WorkPool,
        retrier: UploadRetrier,
        changed: threading.Condition,
        on_change: Callable[[], None],
        identity: Callable[[TaskPlan], Hashable] = output_store,
        shapes_of: ShapesOf,
        spool: LocalSpool | None = None,
        kept_bytes: int = KEPT_BYTES,
        aside: Aside | None = None,
        meter: Meter | None = None,
    ) -> None:
        self._layers = [range(stage.first_layer, stage.last_layer + 1) for stage in stages]
        self._tasks = tasks
        self._open, self._identity, self._pool, self._retrier = open_checkpoints, identity, pool, retrier
        self._changed, self._on_change = changed, on_change
        self._shapes_of = shapes_of
        self._spool = spool or LocalSpool(None)
        self._kept_bytes = kept_bytes
        self._aside = aside or Aside()
        self._meter = meter or NullMeter()

    # --- with the lock held -------------------------------------------------------------------------------------

    def receive(self, stage: int, uid: str, number: int, part: StageState) -> None:
        """A stage's part of the checkpoint with that item number. Raises ``OutOfOrder`` when it is of another step."""
        task = self._tasks.get(uid)
        snapshot = task.checkpoint.snapshot if task is not None else None
        if task is None or snapshot is None or snapshot.number != number:
            return
        if part.updates != snapshot.progress.updates:
            raise OutOfOrder(
                f"stage {stage} has applied {part.updates} updates of {task.name}, not {snapshot.progress.updates}"
            )
        snapshot.parts[stage] = part.tensors
        if len(snapshot.parts) == len(self._layers):
            self._gathered(task, snapshot)

    def want(self, task: TaskRun) -> None:
        """Make the restoration of a task."""
        self._retrier.begin(
            self._pool,
            Attempt(
                task,
                "fetching a checkpoint",
                work=partial(self._fetched, task),
                done=partial(self._restored, task),
                lost=partial(self._not_restored, task),
                store=lambda: self._identity(task.plan),
            ),
        )

    def take_back(self, task: TaskRun, state: TaskState) -> None:
        """``state`` is newer than what the store has: the task goes on from it, and it is brought there."""
        task.checkpoint, task.writing = task.checkpoint.kept(state), True
        self._write(task)

    def come_back(self, task: TaskRun) -> None:
        """A plan that left ``task`` out may have ended the writing of its state; it is in a plan again."""
        if not task.withdrawn and not task.writing and task.checkpoint.is_ahead:
            task.writing = True
            self._write(task)

    def _gathered(self, task: TaskRun, snapshot: PendingCheckpoint) -> None:
        parts = snapshot.parts
        tensors = {name: tensor for stage in sorted(parts) for name, tensor in parts[stage].items()}
        if len(tensors) != sum(map(len, parts.values())):
            raise OutOfOrder(f"two stages sent the same tensor of {task.name}")
        best = snapshot.best.tensors if snapshot.best is not None else {}
        state = TaskState(snapshot.progress, tensors, best, snapshot.history)
        task.checkpoint = task.checkpoint.gathered(state)
        if not task.writing:
            task.writing = True
            self._write(task)
        self._on_change()

    def _make_room(self) -> None:
        waiting = [
            (task, task.checkpoint.state.bytes)
            for task in self._tasks.values()
            if task.phase is TaskPhase.PREEMPTED and task.checkpoint.state is not None
        ]
        held = sum(size for _, size in waiting)
        for task, size in waiting:  # it is all in the store
            if held <= self._kept_bytes:
                return
            held -= size
            task.checkpoint = task.checkpoint.released()

    # --- in a pool -----------------------------------------------------------------------------------------------

    def find(self, task: TaskPlan, fingerprint: Fingerprint) -> int:
        """Step of the newest checkpoint of ``task``; 0 when there is none. Raises ``CheckpointMismatch``, StorageError."""
        store, folder = self._open(task)
        found = newest_progress(store, folder)
        if found is None:
            return 0
        check_progress(found, fingerprint, folder)
        return found.step

    def facts(self, task: TaskPlan) -> Fingerprint:
        """Of ``task`` when it began, as its newest checkpoint has them; none without one. Raises as ``find`` does."""
        found = newest_progress(*self._open(task)) or self._spool.progress(task.uid)
        return found.fingerprint if found is not None else {}

    def kept_state(self, task: TaskPlan, fingerprint: Fingerprint, newer_than: int) -> TaskState | None:
        """What an earlier run could not bring to the store, if it is of a later step. Raises ``CheckpointMismatch``."""
        state = self._spool.state(task.uid, newer_than)
        if state is not None:
            check_progress(state.progress, fingerprint, "rank 0's own volume")
        return state

    def forget(self, task: TaskRun) -> None:
        """Remove what lies in the store of a task that is at its end. What cannot be removed costs nothing but room. With
        the lock held or without it."""
        self._retrier.begin(
            self._pool,
            Attempt(
                task,
                "removing its checkpoints",
                work=lambda: delete_checkpoints(*self._open(task.plan)),
                done=lambda _: None,
                lost=lambda error: log.warning(
                    "the checkpoints of %s cannot be removed: %s", task.name, error
                ),
                store=lambda: self._identity(task.plan),
                tries=1,
                cleans=True,
            ),
        )

    def _write(self, task: TaskRun) -> None:
        """Bring the newest state of ``task`` to the store, again if a newer one comes meanwhile."""
        self._retrier.begin(
            self._pool,
            Attempt(
                task,
                "writing a checkpoint",
                work=partial(self._write_newest, task),
                done=partial(self._written, task),
                lost=partial(self._not_written, task),
                store=lambda: self._identity(task.plan),
                keep=partial(self._keep_newest, task),
            ),
        )

    def _written(self, task: TaskRun, step: int) -> None:
        with self._changed:
            task.checkpoint = task.checkpoint.stored(step)
            task.note_stored()
            newer = task.checkpoint.is_ahead
            if not newer:
                task.writing = False
                if task.in_stream:
                    task.checkpoint = task.checkpoint.released()
                self._make_room()
            ended = task.phase is TaskPhase.SUCCEEDED
            self._on_change()
        if ended:
            self.forget(task)
        if newer:
            self._write(task)

    def _not_written(self, task: TaskRun, _: Exception) -> None:
        """Nobody wants it any more; or somebody does again, who was too late to stop this."""
        self._spool.forget_states(task.uid)
        with self._changed:
            task.writing = False
            self.come_back(task)
            self._on_change()

    def _keep_newest(self, task: TaskRun) -> None:
        with self._changed:
            state = task.checkpoint.state
        if state is not None:
            self._spool.keep_state(task.uid, state)

    def _write_newest(self, task: TaskRun) -> int:
        """The step that was written."""
        try:
            with scratch_folder(self._scratch_of(task), "checkpoint") as local:
                saved = self._saved(
                    task, local
                )  # nothing here holds its tensors while the store takes its time
                store, folder = self._open(task.plan)
                with self._meter.storing("checkpoint"):
                    write_saved(store, folder, saved)
        except Withdrawn:
            raise
        except StorageError:
            self._keep_newest(task)
            raise
        except Exception as error:  # whatever it is: what a task has done is not given up
            log.exception("a checkpoint of %s cannot be written", task.name)
            self._keep_newest(task)
            raise StorageError(FailureReason.INTERNAL_ERROR, f"{type(error).__name__}: {error}") from error
        self._spool.forget_states(task.uid)
        return saved.progress.step

    def _scratch_of(self, task: TaskRun) -> Path | None:
        with self._changed:
            state = task.checkpoint.state
        return self._spool.scratch_for(state.bytes if state is not None else 0)

    def _saved(self, task: TaskRun, folder: Path) -> SavedState:
        """Its newest state, in a file."""
        with self._changed:
            state = task.checkpoint.state
        if state is None:  # it failed, or is published
            raise Withdrawn(task.name)
        return save_state(state, folder)

    def _fetched(self, task: TaskRun) -> Restoration | None:
        state = self._newest_state(task)
        return self._restoration(state) if state is not None else None

    def _restored(self, task: TaskRun, made: Restoration | None) -> None:
        with self._changed:
            task.fetching = False
            if made is None:
                log.warning(
                    "the checkpoints of %s no longer exist in the store: it starts from the beginning",
                    task.name,
                )
                task.restart()
            else:
                task.checkpoint = task.checkpoint.fetched(made)
            self._on_change()

    def _not_restored(self, task: TaskRun, error: Exception) -> None:
        if isinstance(error, Withdrawn):
            return
        reason = error.reason if isinstance(error, CheckpointMismatch) else FailureReason.INTERNAL_ERROR
        log.warning("%s cannot be resumed", task.name, exc_info=error)
        with self._changed:
            task.fail(reason, str(error) if isinstance(error, CheckpointMismatch) else repr(error))
            self._on_change()

    def _newest_state(self, task: TaskRun) -> TaskState | None:
        with self._changed:
            state = task.checkpoint.state
        if state is None:
            assert task.prepared is not None
            store, folder = self._open(task.plan)
            moments = (task.plan.training.optimizer or Optimizer()).moments
            wanted = Wanted(task.prepared.fingerprint, self._shapes_of(task.plan), moments)
            state = newest_state(store, folder, wanted, self._aside.folder)
        return state

    def _restoration(self, state: TaskState) -> Restoration:
        """Raises for what cannot be taken up, which is this task's failure alone."""
        try:
            history = History(state.history, until=state.progress.step)
        except ValueError as error:
            raise CheckpointMismatch(
                f"the losses in the checkpoint after step {state.progress.step} cannot be read: {error}; delete the "
                f"checkpoint to start from the beginning, or choose another output.uri"
            ) from None
        parts = [stage_part(state.tensors, layers) for layers in self._layers]
        payloads = {stage: self._aside.payload(part) for stage, part in enumerate(parts) if stage > 0}
        return Restoration(state.progress, parts[0], payloads, state.best, history)
