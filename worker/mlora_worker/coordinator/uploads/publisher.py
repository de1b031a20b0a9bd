"""Finished adapters on their way to their stores, in the background; then what was kept of their tasks is deleted."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from mlora_worker.coordinator.metrics import Meter
from mlora_worker.coordinator.preparation.prepare import BaseModel
from mlora_worker.coordinator.task.outcome import TrainingResult
from mlora_worker.coordinator.task.run import TaskRun
from mlora_worker.coordinator.uploads.checkpoints import CheckpointTransfer
from mlora_worker.coordinator.uploads.publish import finished_adapter, upload
from mlora_worker.coordinator.uploads.retrier import Attempt, UploadRetrier, Withdrawn, WorkPool
from mlora_worker.coordinator.uploads.store_identity import output_store
from mlora_worker.protocol import AdapterInfo, StorageAccess
from mlora_worker.storage.artifacts.adapter import FinishedAdapter, fingerprint
from mlora_worker.storage.artifacts.aside import Aside
from mlora_worker.storage.artifacts.local_spool import LocalSpool
from mlora_worker.storage.object_store.store import Store

log = logging.getLogger(__name__)


class Publisher:
    """Its methods are called with the coordinator's lock held or without it."""

    def __init__(
        self,
        *,
        base: BaseModel,
        open_store: Callable[[StorageAccess], Store],
        spool: LocalSpool,
        aside: Aside,
        pool: WorkPool,
        retrier: UploadRetrier,
        meter: Meter,
        checkpoints: CheckpointTransfer,
        changed: threading.Condition,
        on_change: Callable[[], None],
        on_lost: Callable[[TaskRun, Exception], None],
    ) -> None:
        """``on_change`` is called with ``changed`` held; ``on_lost`` without it, when no adapter will come."""
        self._base, self._open_store, self._spool, self._aside = base, open_store, spool, aside
        self._pool, self._retrier, self._meter = pool, retrier, meter
        self._checkpoints = checkpoints
        self._changed, self._on_change, self._on_lost = changed, on_change, on_lost

    def publish(self, task: TaskRun, outcome: TrainingResult, parts: Sequence[dict[str, Tensor]]) -> None:
        """``parts``: of each stage."""
        assert task.prepared is not None
        self._retrier.begin(
            self._pool,
            Attempt(
                task,
                "joining the adapter",
                work=partial(
                    finished_adapter, task.plan, task.prepared, outcome, parts, self._base, self._aside
                ),
                done=partial(self.upload, task),
                lost=partial(self._on_lost, task),
            ),
        )

    def upload(self, task: TaskRun, finished: FinishedAdapter) -> None:
        def work() -> AdapterInfo:
            with self._meter.storing("adapter"):
                return upload(task.plan, finished, self._open_store(task.plan.storage), self._spool)

        self._retrier.begin(
            self._pool,
            Attempt(
                task,
                "uploading the adapter",
                work=work,
                done=partial(self._uploaded, task),
                lost=partial(self._not_uploaded, task),
                store=lambda: output_store(task.plan),
                keep=lambda: self._spool.keep_adapter(task.uid, fingerprint(task.plan), finished),
            ),
        )

    def forget(self, task: TaskRun) -> None:
        """It is published: nothing of it is needed to resume."""
        self.forget_kept(task)
        self._checkpoints.forget(task)

    def forget_kept(self, task: TaskRun) -> None:
        """What this rank's volume has of it."""
        self._retrier.begin(
            self._pool,
            Attempt(
                task,
                "cleaning this rank's volume",
                work=partial(self._spool.forget, task.uid),
                done=lambda _: None,
                lost=lambda error: log.warning("the files of %s cannot be removed: %s", task.name, error),
                tries=1,
                cleans=True,
            ),
        )

    def _uploaded(self, task: TaskRun, adapter: AdapterInfo) -> None:
        with self._changed:
            task.publish(adapter)
            self._on_change()
        self.forget(task)
        log.info("adapter of %s is published at %s", task.name, adapter.uri)

    def _not_uploaded(self, task: TaskRun, error: Exception) -> None:
        if isinstance(error, Withdrawn):  # a try that was under way may have kept it once more
            self._spool.forget(task.uid)
        self._on_lost(task, error)
