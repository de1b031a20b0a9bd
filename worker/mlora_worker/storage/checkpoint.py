"""A task's state at the end of a step, kept so that another run goes on from there.

Below the task's folder each checkpoint has a folder of its own:

    step-50/state.safetensors   the adapter's parameters and AdamW's two moments, float32, of all stages
    step-50/progress.json       ``Progress``: where the task stands, and of which task and data it is
    step-50/manifest.json       ``CheckpointManifest``: sizes and SHA-256 of both; written last

A checkpoint without a complete manifest does not exist. The names of the tensors are those of the adapter's file with a
prefix, and carry global layer indices: a task may go on with another number of stages. There is no pickle, and no state of
a random generator: masks, order and start follow from the seed and the step (lora/dropout.py, data/order.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from torch import Tensor

from mlora_worker.protocol import (
    Amount,
    Count,
    EvaluationRecord,
    FailureReason,
    ManifestFile,
    Message,
    Real,
    StepRecord,
)
from mlora_worker.storage import uri as address
from mlora_worker.storage.documents import read_document, version_of
from mlora_worker.storage.errors import ObjectNotFound, StorageError
from mlora_worker.storage.scratch import save_tensors, scratch_folder, sha256_of
from mlora_worker.storage.store import Store
from mlora_worker.storage.uri import join, name_below

log = logging.getLogger(__name__)

VERSION = 1
KEPT = 2  # newest complete checkpoints of a task that stay
STATE_NAME, PROGRESS_NAME, MANIFEST_NAME = "state.safetensors", "progress.json", "manifest.json"

PARAMETERS, FIRST_MOMENTS, SECOND_MOMENTS = "parameters.", "firstMoments.", "secondMoments."
PREFIXES = (PARAMETERS, FIRST_MOMENTS, SECOND_MOMENTS)
_BEST, _HISTORY = (
    "best.",
    "history",
)  # in the same file: the adapter that evaluated best, and the lines of losses

Fact = str | int | float | bool | tuple[str, ...] | None
Fingerprint = Mapping[str, Fact]  # all that decides a task's result, by a name that a user understands

DAY = "dataset.date"  # on which its rows were rendered first, where the template writes the date


class CheckpointMismatch(Exception):
    """The checkpoint belongs to another task, and the message names what differs; or to another version of the worker."""

    reason = FailureReason.CHECKPOINT_MISMATCH


class DamagedCheckpoint(Exception):
    """Its files are not what its manifest says."""


class EvaluationProgress(Message):
    """What further evaluations are compared with."""

    last: EvaluationRecord | None = None
    best: EvaluationRecord | None = None  # the lowest loss
    reference: Real | None = None  # the loss that early stopping compares with
    since: Amount = 0  # evaluations since that
    stopped: bool = False  # early: no step follows


class Progress(Message):
    """Where a task stands after ``step`` optimizer steps."""

    step: Count
    total_steps: Count
    updates: Amount  # AdamW's count: steps without a supervised token make none
    epoch: Amount  # of the next step, from 0
    epoch_step: Amount  # the next step's place in its epoch, from 0
    learning_rate: Real  # of the last step
    last: StepRecord | None
    tokens: Amount
    seconds: Real  # of training
    evaluation: EvaluationProgress | None = None
    task_uid: str
    task: str  # namespace/name
    fingerprint: dict[str, Fact]


class CheckpointManifest(Message):
    version: int = VERSION
    step: Count
    task_uid: str
    files: tuple[ManifestFile, ...]


@dataclass(frozen=True, slots=True)
class TaskState:
    """A whole checkpoint in memory. ``tensors``: by PEFT's names behind one of ``PREFIXES``, of all stages. ``best``: the
    adapter that evaluated best, by PEFT's names, where it is kept. ``history``: lines of the losses' file.
    """

    progress: Progress
    tensors: Mapping[str, Tensor]
    best: Mapping[str, Tensor] = field(default_factory=dict)
    history: bytes = b""

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.tensors.values(), *self.best.values()))

    def filed(self) -> dict[str, Tensor]:
        """All of it but ``progress``, as it lies in the file."""
        found = dict(self.tensors) | {_BEST + name: tensor for name, tensor in self.best.items()}
        if self.history:
            found[_HISTORY] = torch.frombuffer(bytearray(self.history), dtype=torch.uint8)
        return found


def _state_of(progress: Progress, filed: dict[str, Tensor]) -> TaskState:
    """The opposite of ``filed``."""
    history = filed.pop(_HISTORY, None)
    best = {name.removeprefix(_BEST): filed.pop(name) for name in list(filed) if name.startswith(_BEST)}
    return TaskState(progress, filed, best, history.numpy().tobytes() if history is not None else b"")


def check_fingerprint(found: Fingerprint, wanted: Fingerprint, where: str) -> None:
    """Raises ``CheckpointMismatch`` that names the first fact that differs.

    The day counts where both have it: workers from before it was a fact wrote none, and what the rows became is a fact
    of its own.
    """
    passed_over = set() if DAY in found and DAY in wanted else {DAY}
    for name in sorted((found.keys() | wanted.keys()) - passed_over):
        one, other = _plain(found.get(name)), _plain(wanted.get(name))
        if one != other:
            raise CheckpointMismatch(
                f"the checkpoint at {where} was made with {name} {_shown(one)}, the task has {_shown(other)}; delete the "
                "checkpoint to begin anew, or choose another output.uri"
            )


def write_checkpoint(
    store: Store, folder: str, state: TaskState, scratch: Path | None = None, kept: int = KEPT
) -> None:
    """Write ``state`` below the task's ``folder``, then remove what it makes superfluous: all but the ``kept`` newest.
    Raises StorageError; may be called again after one. ``scratch`` is a local folder with room for the tensors (None: the
    system's temporary one).
    """
    try:
        _write(store, _place(folder, state.progress.step), state, scratch)
    except StorageError as error:
        if error.reason is FailureReason.INSUFFICIENT_SPACE:
            # The next try has the room of all but the newest one.
            with contextlib.suppress(StorageError):
                _prune(store, folder, 1)
        raise
    _prune(store, folder, kept)


def _write(store: Store, place: str, state: TaskState, scratch: Path | None) -> None:
    store.delete(join(place, MANIFEST_NAME))
    with scratch_folder(scratch, "checkpoint") as local:
        path = save_tensors(state.filed(), local / STATE_NAME, "checkpoint")
        files = [ManifestFile(name=STATE_NAME, bytes=path.stat().st_size, sha256=sha256_of(path))]
        store.write_file(join(place, STATE_NAME), path)
    progress = state.progress.model_dump_json(by_alias=True).encode()
    files.append(
        ManifestFile(name=PROGRESS_NAME, bytes=len(progress), sha256=hashlib.sha256(progress).hexdigest())
    )
    store.write(join(place, PROGRESS_NAME), progress)
    manifest = CheckpointManifest(
        step=state.progress.step, task_uid=state.progress.task_uid, files=tuple(files)
    )
    store.write(join(place, MANIFEST_NAME), manifest.model_dump_json(by_alias=True).encode())


def newest_progress(store: Store, folder: str) -> Progress | None:
    """Of the newest complete checkpoint below ``folder``; None when there is none.

    Raises StorageError, and ``CheckpointMismatch`` for a checkpoint of another version of the worker.
    """
    for step in sorted(_complete_steps(store, folder), reverse=True):
        try:
            return _read_progress(store, folder, _read_manifest(store, folder, step))
        except DamagedCheckpoint as error:
            log.warning("a checkpoint is passed over and removed: %s", error)
            forget_checkpoint(store, folder, step)
    return None


def newest_state(store: Store, folder: str) -> TaskState | None:
    """The newest checkpoint below ``folder`` whose files are what its manifest says; None when there is none. One that is
    damaged is removed, and the one before it is taken. Raises as ``newest_progress`` does.
    """
    for step in sorted(_complete_steps(store, folder), reverse=True):
        try:
            manifest = _read_manifest(store, folder, step)
            progress = _read_progress(store, folder, manifest)
            return _state_of(progress, _read_tensors(store, folder, manifest))
        except DamagedCheckpoint as error:
            log.warning("a checkpoint is passed over and removed: %s", error)
            forget_checkpoint(store, folder, step)
    return None


def forget_checkpoint(store: Store, folder: str, step: int) -> None:
    """Its manifest goes first: whenever this is cut off, no half of it is taken for a whole."""
    place = _place(folder, step)
    for name in (MANIFEST_NAME, PROGRESS_NAME, STATE_NAME):
        store.delete(join(place, name))
    _remove_empty(place)


def delete_checkpoints(store: Store, folder: str) -> None:
    """All checkpoints below ``folder``, whole or not: the task is at its end."""
    for step in _steps(store, folder):
        forget_checkpoint(store, folder, step)
    _remove_empty(folder)


def stage_part(tensors: Mapping[str, Tensor], layers: range) -> dict[str, Tensor]:
    """Those of ``tensors`` that belong to decoder layers ``layers``."""
    return {name: tensor for name, tensor in tensors.items() if layer_of(name) in layers}


def layer_of(name: str) -> int:
    """Global index of the decoder layer in a tensor's name: its first part that is a number."""
    for part in name.split("."):
        if part.isdigit():
            return int(part)
    raise ValueError(f"{name} names no layer")


def _complete_steps(store: Store, folder: str) -> list[int]:
    return [step for step, names in _steps(store, folder).items() if MANIFEST_NAME in names]


def _steps(store: Store, folder: str) -> dict[int, Collection[str]]:
    """Step -> names of the files that its folder has."""
    try:
        found = store.list(folder)
    except ObjectNotFound:
        return {}
    steps: dict[int, set[str]] = {}
    for one in found:
        match = re.fullmatch(r"step-(\d+)/([^/]+)", name_below(folder, one))
        if match:
            steps.setdefault(int(match[1]), set()).add(match[2])
    return dict(steps)


def _read_manifest(store: Store, folder: str, step: int) -> CheckpointManifest:
    where = join(_place(folder, step), MANIFEST_NAME)
    try:
        data = store.read(where)
    except ObjectNotFound:
        raise DamagedCheckpoint(f"{where} is gone") from None
    version = version_of(data)
    if version is None:
        raise DamagedCheckpoint(f"{where} is no manifest")
    if version != VERSION:
        raise _of_another_version(
            where, f"it has format version {version!r}, this worker writes and reads {VERSION}"
        )
    try:
        manifest = read_document(CheckpointManifest, data)
    except ValueError as error:
        raise _of_another_version(where, error) from None
    if manifest.step != step:
        raise DamagedCheckpoint(f"{where} is the manifest of another checkpoint")
    if not {STATE_NAME, PROGRESS_NAME} <= {file.name for file in manifest.files}:
        raise _of_another_version(where, "it lists other files")
    return manifest


def _read_progress(store: Store, folder: str, manifest: CheckpointManifest) -> Progress:
    place = _place(folder, manifest.step)
    try:
        return read_document(Progress, _read_file(store, place, manifest, PROGRESS_NAME))
    except ValueError as error:
        raise _of_another_version(join(place, PROGRESS_NAME), error) from None


def _of_another_version(where: str, why: object) -> CheckpointMismatch:
    """For what is whole, as its manifest says, and cannot be read here: it is another worker's, and stays."""
    return CheckpointMismatch(
        f"{where} was written by another version of the worker and cannot be read: {why}; use the worker that wrote it, or "
        "delete the checkpoint to begin anew"
    )


def _read_file(store: Store, place: str, manifest: CheckpointManifest, name: str) -> bytes:
    file = next(file for file in manifest.files if file.name == name)
    where = join(place, name)
    try:
        data = store.read(where)
    except ObjectNotFound:
        raise DamagedCheckpoint(f"{where} is gone") from None
    if len(data) != file.bytes or hashlib.sha256(data).hexdigest() != file.sha256:
        raise DamagedCheckpoint(f"{where} is not what its manifest says")
    return data


def _read_tensors(store: Store, folder: str, manifest: CheckpointManifest) -> dict[str, Tensor]:
    place = _place(folder, manifest.step)
    data = _read_file(store, place, manifest, STATE_NAME)
    try:
        return dict(load_safetensors(data))
    except SafetensorError as error:
        raise _of_another_version(join(place, STATE_NAME), error) from None


def _prune(store: Store, folder: str, kept: int) -> None:
    """Keep the ``kept`` newest complete ones. What is incomplete and older than the newest complete one is a leftover; what
    is newer may be in writing."""
    steps = _steps(store, folder)
    complete = sorted(step for step, names in steps.items() if MANIFEST_NAME in names)
    staying = complete[-kept:]
    for step in sorted(steps):
        if complete and step not in staying and step < complete[-1]:
            forget_checkpoint(store, folder, step)


def _place(folder: str, step: int) -> str:
    return join(folder, f"step-{step}")


def _remove_empty(place: str) -> None:
    """Stores have no folders; a disk has, and an empty one would stay for ever."""
    if address.scheme(place) == address.FILE:
        with contextlib.suppress(OSError):
            address.file_path(place).rmdir()


def _plain(fact: Fact | list[str]) -> Fact:
    return tuple(fact) if isinstance(fact, list) else fact


def _shown(fact: Fact) -> str:
    return "none" if fact is None else ", ".join(fact) if isinstance(fact, tuple) else str(fact)
