"""A task's state at the end of a step, kept so that another run goes on from there.

Below the task's folder each checkpoint has a folder of its own:

    step-50/state.safetensors   the adapter's parameters and its optimizer's moments, float32, of all stages
    step-50/progress.json       ``SavedProgress``: where the task stands, and of which task and data it is
    step-50/manifest.json       ``CheckpointManifest``: sizes and SHA-256 of both; written last

A checkpoint without a complete manifest does not exist. The names of the tensors are those of the adapter's file with a
prefix, and carry global layer indices: a task may go on with another number of stages. There is no pickle, and no state of
a random generator: masks, order and start follow from the seed and the step (lora/dropout.py, step_order.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, TypeVar

from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from torch import Tensor

from mlora_worker.bounds import Count, Word
from mlora_worker.protocol import FailureReason, ManifestFile, Message
from mlora_worker.storage import uri as address
from mlora_worker.storage.artifacts.agreement import (
    check_agreement,
    check_progress,
    check_tensors,
    contradiction,
    most_bytes,
)
from mlora_worker.storage.artifacts.aside import tensors_of
from mlora_worker.storage.artifacts.task_state import (
    CheckpointMismatch,
    SavedProgress,
    TaskState,
    Wanted,
    state_of,
)
from mlora_worker.storage.errors import ObjectNotFound, StorageError, TooLarge
from mlora_worker.storage.limits import DOCUMENT
from mlora_worker.storage.object_store.scratch import save_tensors, scratch_folder, sha256_of
from mlora_worker.storage.object_store.store import Store
from mlora_worker.storage.uri import join, name_below
from mlora_worker.storage.versioned_json import read_document, version_of

log = logging.getLogger(__name__)

VERSION = 1
KEPT = 2  # newest complete checkpoints of a task that stay
_MOST_FILES: Final = 10_000  # below a task's folder: it has a dozen, whatever happened to its writers
_MOST_TRIED: Final = 16  # damaged ones that are passed over
_MOST_PRUNED: Final = 64  # at once
_LARGEST_PROGRESS: Final = 16 * 2**20  # bytes; facts name all modules
STATE_NAME, PROGRESS_NAME, MANIFEST_NAME = "state.safetensors", "progress.json", "manifest.json"

Found = TypeVar("Found")


class DamagedCheckpoint(Exception):
    """Its files are not what its manifest says."""


class CheckpointManifest(Message):
    version: Count = VERSION
    step: Count
    task_uid: Word
    files: Annotated[tuple[ManifestFile, ...], Field(max_length=64)]


@dataclass(frozen=True, slots=True)
class SavedState:
    """A state whose tensors are in a local file."""

    progress: SavedProgress
    path: Path
    sha256: str


def save_state(state: TaskState, folder: Path) -> SavedState:
    """In a local ``folder``. Raises StorageError where there is no room."""
    path = save_tensors(state.filed(), folder / STATE_NAME, "checkpoint")
    return SavedState(state.progress, path, sha256_of(path))


def write_checkpoint(
    store: Store, folder: str, state: TaskState, scratch: Path | None = None, kept: int = KEPT
) -> None:
    """``write_saved`` of ``state``. ``scratch`` is a local folder with room for the tensors (None: the system's temporary
    one)."""
    with scratch_folder(scratch, "checkpoint") as local:
        write_saved(store, folder, save_state(state, local), kept)


def write_saved(store: Store, folder: str, state: SavedState, kept: int = KEPT) -> None:
    """Write ``state`` below the task's ``folder``, then remove what it makes superfluous: all but the ``kept`` newest.
    Raises StorageError; may be called again after one.
    """
    try:
        _write(store, _place(folder, state.progress.step), state)
    except StorageError as error:
        if error.reason is FailureReason.INSUFFICIENT_SPACE:
            # The next try has the room of all but the newest one.
            with contextlib.suppress(StorageError):
                _prune(store, folder, 1)
        raise
    _prune(store, folder, kept)


def _write(store: Store, place: str, state: SavedState) -> None:
    store.delete(join(place, MANIFEST_NAME))
    files = [ManifestFile(name=STATE_NAME, bytes=state.path.stat().st_size, sha256=state.sha256)]
    store.write_file(join(place, STATE_NAME), state.path)
    progress = state.progress.model_dump_json(by_alias=True).encode()
    files.append(
        ManifestFile(name=PROGRESS_NAME, bytes=len(progress), sha256=hashlib.sha256(progress).hexdigest())
    )
    store.write(join(place, PROGRESS_NAME), progress)
    manifest = CheckpointManifest(
        step=state.progress.step, task_uid=state.progress.task_uid, files=tuple(files)
    )
    store.write(join(place, MANIFEST_NAME), manifest.model_dump_json(by_alias=True).encode())


def newest_progress(store: Store, folder: str) -> SavedProgress | None:
    """Of the newest complete checkpoint below ``folder``; None when there is none.

    Raises StorageError, and ``CheckpointMismatch`` for a checkpoint of another version of the worker.
    """
    return _newest_whole(store, folder, lambda manifest: _read_progress(store, folder, manifest))


def newest_state(
    store: Store, folder: str, wanted: Wanted | None = None, scratch: Path | None = None
) -> TaskState | None:
    """The newest checkpoint below ``folder`` whose files are what its manifest says; None when there is none. One that is
    damaged is removed, and the one before it is taken. Raises as ``newest_progress`` does, and ``CheckpointMismatch`` for
    what is none of the ``wanted`` task's: of that no tensor is read. ``scratch``: a local folder with room for the tensors,
    which are views of a file without a name there; None: they are in memory.
    """

    def read(manifest: CheckpointManifest) -> TaskState:
        progress = _read_progress(store, folder, manifest)
        if wanted is not None:
            check_progress(progress, wanted.fingerprint, folder)
        state = _read_state(store, folder, manifest, progress, wanted, scratch)
        if wanted is not None:
            check_tensors(state, wanted, _place(folder, manifest.step))
        return state

    return _newest_whole(store, folder, read)


def _newest_whole(store: Store, folder: str, read: Callable[[CheckpointManifest], Found]) -> Found | None:
    for tried, step in enumerate(sorted(_complete_steps(store, folder), reverse=True)):
        if tried == _MOST_TRIED:
            raise CheckpointMismatch(
                f"the newest {_MOST_TRIED} checkpoints at {folder} were all damaged: delete the others there to "
                f"start from the beginning"
            )
        try:
            return read(_read_manifest(store, folder, step))
        except DamagedCheckpoint as error:
            log.warning("a checkpoint is skipped and removed: %s", error)
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
    raise ValueError(f"{name} does not name a layer")


def _complete_steps(store: Store, folder: str) -> list[int]:
    return [step for step, names in _steps(store, folder).items() if MANIFEST_NAME in names]


def _steps(store: Store, folder: str) -> dict[int, Collection[str]]:
    """Step -> names of the files that its folder has."""
    try:
        found = store.list(folder, _MOST_FILES)
    except ObjectNotFound:
        return {}
    steps: dict[int, set[str]] = {}
    for one in found:
        match = re.fullmatch(r"step-([1-9][0-9]{0,14})/([^/]+)", name_below(folder, one))
        if match:
            steps.setdefault(int(match[1]), set()).add(match[2])
    return dict(steps)


def _read_manifest(store: Store, folder: str, step: int) -> CheckpointManifest:
    where = join(_place(folder, step), MANIFEST_NAME)
    try:
        data = store.read(where, DOCUMENT)
    except ObjectNotFound:
        raise DamagedCheckpoint(f"{where} no longer exists") from None
    except TooLarge:
        raise DamagedCheckpoint(f"{where} is not a manifest") from None
    version = version_of(data)
    if version is None:
        raise DamagedCheckpoint(f"{where} is not a manifest")
    if version != VERSION:
        raise _of_another_version(where, f"it has format version {version!r}, this worker supports {VERSION}")
    try:
        manifest = read_document(CheckpointManifest, data)
    except ValueError as error:
        raise _of_another_version(where, error) from None
    if manifest.step != step:
        raise DamagedCheckpoint(f"{where} is the manifest of another checkpoint")
    if not {STATE_NAME, PROGRESS_NAME} <= {file.name for file in manifest.files}:
        raise _of_another_version(where, "it lists other files")
    return manifest


def _read_progress(store: Store, folder: str, manifest: CheckpointManifest) -> SavedProgress:
    place = _place(folder, manifest.step)
    where = join(place, PROGRESS_NAME)
    if _listed(manifest, PROGRESS_NAME).bytes > _LARGEST_PROGRESS:
        raise _of_another_version(where, f"it has more than {_LARGEST_PROGRESS / 2**20:g} MiB")
    try:
        progress = read_document(SavedProgress, _read_file(store, place, manifest, PROGRESS_NAME))
    except ValueError as error:
        raise _of_another_version(where, error) from None
    if (progress.step, progress.task_uid) != (manifest.step, manifest.task_uid):
        raise contradiction(where, "it belongs to another step or task than its manifest")
    check_agreement(progress, where)
    return progress


def _of_another_version(where: str, why: object) -> CheckpointMismatch:
    """For what is whole, as its manifest says, and cannot be read here: it is another worker's, and stays."""
    return CheckpointMismatch(
        f"{where} was written by another version of the worker and cannot be read: {why}; use the worker version "
        f"that wrote it, or delete the checkpoint to start from the beginning"
    )


def _read_file(store: Store, place: str, manifest: CheckpointManifest, name: str) -> bytes:
    file = _listed(manifest, name)
    where = join(place, name)
    try:
        data = store.read(where, file.bytes)
    except ObjectNotFound:
        raise DamagedCheckpoint(f"{where} no longer exists") from None
    except TooLarge:
        raise DamagedCheckpoint(f"{where} does not match its manifest") from None
    if len(data) != file.bytes or hashlib.sha256(data).hexdigest() != file.sha256:
        raise DamagedCheckpoint(f"{where} does not match its manifest")
    return data


def _fetched(
    store: Store, place: str, manifest: CheckpointManifest, scratch: Path
) -> dict[str, Tensor] | None:
    """The tensors, as views of a local file; None where the volume has no room for it."""
    with ExitStack() as open_things:
        try:
            local = open_things.enter_context(scratch_folder(scratch, "checkpoint"))
        except StorageError as error:
            log.warning("a checkpoint is read into memory: %s", error)
            return None
        try:
            _fetch_file(store, place, manifest, STATE_NAME, local / STATE_NAME)
            return tensors_of(local / STATE_NAME)
        except OSError as error:
            log.warning("a checkpoint is read into memory: %s", error)
            return None


def _fetch_file(store: Store, place: str, manifest: CheckpointManifest, name: str, target: Path) -> None:
    """``_read_file``, piece by piece into a local file."""
    file = _listed(manifest, name)
    where, digest, left = join(place, name), hashlib.sha256(), file.bytes
    try:
        with target.open("wb") as local:
            for piece in store.pieces(where):
                left -= len(piece)
                if left < 0:
                    break
                digest.update(piece)
                local.write(piece)
    except ObjectNotFound:
        raise DamagedCheckpoint(f"{where} no longer exists") from None
    if left or digest.hexdigest() != file.sha256:
        raise DamagedCheckpoint(f"{where} does not match its manifest")


def _listed(manifest: CheckpointManifest, name: str) -> ManifestFile:
    return next(file for file in manifest.files if file.name == name)


def _read_state(
    store: Store,
    folder: str,
    manifest: CheckpointManifest,
    progress: SavedProgress,
    wanted: Wanted | None,
    scratch: Path | None,
) -> TaskState:
    place = _place(folder, manifest.step)
    where, size = join(place, STATE_NAME), _listed(manifest, STATE_NAME).bytes
    if wanted is not None and size > most_bytes(wanted.shapes):
        raise contradiction(
            where, f"it has {size} bytes, more than the {most_bytes(wanted.shapes)} that the task can have"
        )
    try:
        tensors = _fetched(store, place, manifest, scratch) if scratch is not None else None
        if tensors is None:
            tensors = load_safetensors(_read_file(store, place, manifest, STATE_NAME))
        return state_of(progress, tensors)
    except (SafetensorError, ValueError) as error:
        raise _of_another_version(where, error) from None


def _prune(store: Store, folder: str, kept: int) -> None:
    """Keep the ``kept`` newest complete ones. What is incomplete and older than the newest complete one is a leftover; what
    is newer may be in writing."""
    steps = _steps(store, folder)
    complete = sorted(step for step, names in steps.items() if MANIFEST_NAME in names)
    staying = complete[-kept:]
    going = [step for step in sorted(steps) if complete and step not in staying and step < complete[-1]]
    for step in going[:_MOST_PRUNED]:
        forget_checkpoint(store, folder, step)


def _place(folder: str, step: int) -> str:
    return join(folder, f"step-{step}")


def _remove_empty(place: str) -> None:
    """Stores have no folders; a disk has, and an empty one would stay for ever."""
    if address.scheme(place) == address.FILE:
        with contextlib.suppress(OSError):
            address.file_path(place).rmdir()
