"""What a task has done, on rank 0's own volume, until its store has it.

A store may refuse for hours what took days to train. Rank 0 may be killed meanwhile; its volume survives that, though not
the end of its pod. Below the root each task has a folder, named by its uid:

    task-UID/checkpoints/step-50/...              the newest state that the store has refused, as ``checkpoint`` writes it
    task-UID/adapter/adapter_model.safetensors    the finished adapter on its way to the store
    task-UID/adapter/history.jsonl                its losses
    task-UID/adapter/record.json                  all else that is published of it; written last

Only the owner may read them: adapters are their users' property, and several users' tasks pass through one worker. Nothing
here raises for want of room: then the work is in memory alone, as it would be without this.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors

from mlora_worker.protocol import Amount, DataCounts, EvaluationRecord, Message, Real
from mlora_worker.storage.artifacts.adapter import HISTORY_NAME, WEIGHTS_NAME, FinishedAdapter, save_weights
from mlora_worker.storage.artifacts.checkpoint import (
    delete_checkpoints,
    newest_progress,
    newest_state,
    write_checkpoint,
)
from mlora_worker.storage.artifacts.task_state import CheckpointMismatch, SavedProgress, TaskState
from mlora_worker.storage.errors import ObjectNotFound, StorageError
from mlora_worker.storage.limits import DOCUMENT
from mlora_worker.storage.object_store.disk_space import volume_of
from mlora_worker.storage.object_store.file_store import FileStore, move_into_place
from mlora_worker.storage.object_store.scratch import remove_abandoned, scratch_folder, sha256_of
from mlora_worker.storage.uri import file_uri
from mlora_worker.storage.versioned_json import read_document

log = logging.getLogger(__name__)

RECORD_NAME = "record.json"
_TASK = "task-"  # begins the name of a task's folder
KEPT_SECONDS = 7 * 24 * 3600.0  # of a task that nobody has asked for


class _Record(Message):
    """``fingerprint``: of the task and its spec, as in the manifest (``adapter.fingerprint``)."""

    version: Literal[1] = 1
    fingerprint: str
    config: dict[str, Any]
    step: Amount
    loss: Real | None
    data: DataCounts | None
    evaluation: EvaluationRecord | None = None
    quantization: str | None = None
    base_type: str | None = None
    sha256: str  # of the weights' file


def _record_of(fingerprint: str, adapter: FinishedAdapter, weights: Path) -> _Record:
    """Raises OSError, and ValidationError for a loss that is no number."""
    return _Record(
        fingerprint=fingerprint,
        config=dict(adapter.config),
        step=adapter.step,
        loss=adapter.loss,
        data=adapter.data,
        evaluation=adapter.evaluation,
        quantization=adapter.quantization,
        base_type=adapter.base_type,
        sha256=sha256_of(weights),
    )


class LocalSpool:
    """``root`` None: there is no volume, and nothing is kept. Calls for different tasks may be made at once."""

    def __init__(self, root: Path | None) -> None:
        self._root = root
        self._files = FileStore(private=True)
        self._states: dict[str, int] = {}  # step of each task's state that was kept by this process
        self._adapters: set[str] = set()  # whose adapters were kept before their upload was tried

    # --- states that the store has refused ----------------------------------------------------------------------

    def keep_state(self, uid: str, state: TaskState) -> None:
        """Again the same one costs nothing."""
        if self._root is None:
            return
        if self._states.get(uid) == state.progress.step:
            with suppress(OSError):
                os.utime(self._folder(uid))  # it is still asked for
            return
        try:
            write_checkpoint(
                self._files, self._states_at(uid), state, scratch=self.scratch_for(state.bytes), kept=1
            )
        except StorageError as error:
            log.warning("the state of %s is only in memory: %s", state.progress.task, error)
        else:
            self._states[uid] = state.progress.step

    def state(self, uid: str, newer_than: int) -> TaskState | None:
        """The newest whole state of ``uid`` after step ``newer_than``. What cannot be read is passed over."""
        if self._root is None:
            return None
        try:
            found = newest_state(self._files, self._states_at(uid))
        except (StorageError, CheckpointMismatch) as error:
            log.warning("the saved state of task %s cannot be read: %s", uid, error)
            return None
        return found if found is not None and found.progress.step > newer_than else None

    def progress(self, uid: str) -> SavedProgress | None:
        """Of the newest state of ``uid``. What cannot be read is passed over."""
        if self._root is None:
            return None
        with suppress(StorageError, CheckpointMismatch):
            return newest_progress(self._files, self._states_at(uid))
        return None

    def forget_states(self, uid: str) -> None:
        """The store has a newer one, or this one."""
        if self._root is None or not self._folder(uid).exists():
            return
        self._states.pop(uid, None)
        with suppress(StorageError):
            delete_checkpoints(self._files, self._states_at(uid))
        with suppress(OSError):  # it holds an adapter
            self._folder(uid).rmdir()

    # --- a finished adapter -------------------------------------------------------------------------------------

    def keep_adapter(self, uid: str, fingerprint: str, adapter: FinishedAdapter) -> None:
        """Before its turn to be uploaded comes. Again the same one costs nothing."""
        if self._root is None:
            return
        if uid in self._adapters:
            with suppress(OSError):
                os.utime(self._adapter_folder(uid))  # it is still asked for
        elif self._keep_adapter(uid, fingerprint, adapter) is not None:
            self._adapters.add(uid)

    @contextmanager
    def weights(self, uid: str, fingerprint: str, adapter: FinishedAdapter) -> Iterator[Path]:
        """The weights' file of ``adapter``, which is kept until ``forget``; where that cannot be, a file that vanishes
        with the block. Raises StorageError where there is no room for that either.
        """
        kept = self._keep_adapter(uid, fingerprint, adapter)
        if kept is not None:
            yield kept
            return
        with scratch_folder(None, "adapter") as folder:
            yield save_weights(adapter.tensors, folder)

    def adapter(self, uid: str, fingerprint: str) -> FinishedAdapter | None:
        """What ``weights`` has kept for the same task with the same spec, if it is whole."""
        if self._root is None:
            return None
        record = self._read_record(uid)
        if record is None or record.fingerprint != fingerprint:
            return None
        weights = self._adapter_folder(uid) / WEIGHTS_NAME
        try:
            if sha256_of(weights) != record.sha256:
                raise ValueError("its weights do not match its record")
            tensors = load_safetensors(weights.read_bytes())
            history = (self._adapter_folder(uid) / HISTORY_NAME).read_bytes()
        except (OSError, ValueError, SafetensorError) as error:
            log.warning("the saved adapter of task %s is ignored: %s", uid, error)
            return None
        return FinishedAdapter(
            tensors,
            record.config,
            record.step,
            record.loss,
            record.data,
            record.evaluation,
            history,
            record.quantization,
            record.base_type,
        )

    # --- both ---------------------------------------------------------------------------------------------------

    def forget(self, uid: str) -> None:
        """Nobody needs what is kept of ``uid`` any more."""
        if self._root is None:
            return
        self._states.pop(uid, None)
        self._adapters.discard(uid)
        folder = self._folder(uid)
        with suppress(OSError):
            (folder / "adapter" / RECORD_NAME).unlink(missing_ok=True)  # first: no half of it may count
        shutil.rmtree(folder, ignore_errors=True)

    def clean(self, now: float) -> None:
        """Once, at the start: remove what killed writers have left, and what nobody has asked for in a week. ``now``: as
        ``time.time`` has it.
        """
        remove_abandoned(None)
        if self._root is None:
            return
        remove_abandoned(self._root)
        for folder in self._root.glob(f"{_TASK}*"):
            with suppress(OSError):
                newest = max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))
                if now - newest > KEPT_SECONDS:
                    shutil.rmtree(folder)

    def scratch_for(self, size: int) -> Path | None:
        """Where a file of ``size`` bytes may wait for its upload: on the volume, or in the system's temporary folder (None)
        if that alone has room.
        """
        if self._root is None:
            return None
        try:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            here, elsewhere = volume_of(self._root), volume_of(Path(tempfile.gettempdir()))
        except OSError:
            return None
        return self._root if here.free > size or elsewhere.free <= size else None

    def scratch_folder_for(self, size: int) -> Path:
        """The same, by its path."""
        return self.scratch_for(size) or Path(tempfile.gettempdir())

    def _keep_adapter(self, uid: str, fingerprint: str, adapter: FinishedAdapter) -> Path | None:
        if self._root is None:
            return None
        folder = self._adapter_folder(uid)
        weights = folder / WEIGHTS_NAME
        if self._has(uid, fingerprint, adapter):
            with suppress(OSError):
                os.utime(folder)  # it is still asked for
            return weights
        try:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            (folder / RECORD_NAME).unlink(missing_ok=True)
            with scratch_folder(self._root, "adapter") as scratch:
                move_into_place(save_weights(adapter.tensors, scratch), weights)
            record = _record_of(fingerprint, adapter, weights)
            self._files.write(file_uri(folder / HISTORY_NAME), adapter.history)
            self._files.write(file_uri(folder / RECORD_NAME), record.model_dump_json(by_alias=True).encode())
        except (StorageError, OSError, ValidationError) as error:
            log.warning("the finished adapter of task %s is only in memory: %s", uid, error)
            return None
        return weights

    def _has(self, uid: str, fingerprint: str, adapter: FinishedAdapter) -> bool:
        """Whether ``adapter`` itself is kept, and whole. What is not is written anew: nothing damaged is published."""
        folder = self._adapter_folder(uid)
        record = self._read_record(uid)
        try:
            return (
                record is not None
                and record == _record_of(fingerprint, adapter, folder / WEIGHTS_NAME)
                and (folder / HISTORY_NAME).read_bytes() == adapter.history
            )
        except (OSError, ValidationError):
            return False

    def _read_record(self, uid: str) -> _Record | None:
        try:
            return read_document(
                _Record, self._files.read(file_uri(self._adapter_folder(uid) / RECORD_NAME), 4 * DOCUMENT)
            )
        except ObjectNotFound:
            return None
        except (StorageError, ValueError) as error:
            log.warning("the record of a finished adapter of task %s is ignored: %s", uid, error)
            return None

    def _folder(self, uid: str) -> Path:
        assert self._root is not None
        return self._root / (_TASK + quote(uid, safe=""))

    def _adapter_folder(self, uid: str) -> Path:
        return self._folder(uid) / "adapter"

    def _states_at(self, uid: str) -> str:
        return file_uri(self._folder(uid) / "checkpoints")
