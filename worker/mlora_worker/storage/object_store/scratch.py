"""Files on the worker's own disk on their way to a store.

A folder of a writer at work holds a lock, which the kernel takes back when its process ends, however it ends: so what a
killed writer has left is told from what a living one still needs, also where several workers share the disk.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from mlora_worker.protocol import FailureReason
from mlora_worker.storage.errors import StorageError
from mlora_worker.storage.object_store.file_store import NO_SPACE

_PIECE = 8 * 2**20
_PREFIX = "mlora-scratch-"
_LOCK = ".lock"


@contextmanager
def scratch_folder(parent: Path | None, what: str) -> Iterator[Path]:
    """A folder that vanishes with the block; in the system's temporary one without ``parent``. ``what`` is for messages,
    such as "adapter". Raises StorageError where there is no room for it."""
    with ExitStack() as open_things:
        try:
            made = tempfile.TemporaryDirectory(dir=parent, prefix=_PREFIX, ignore_cleanup_errors=True)
            folder = Path(open_things.enter_context(made))
            fcntl.flock(open_things.enter_context((folder / _LOCK).open("wb")), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise _no_room(parent, error, what) from None
        yield folder


def remove_abandoned(parent: Path | None) -> None:
    """Remove the scratch folders in ``parent`` (None: the system's temporary one) whose writers are gone."""
    for lock in (parent or Path(tempfile.gettempdir())).glob(f"{_PREFIX}*/{_LOCK}"):
        with suppress(OSError), lock.open("rb") as file:  # held by a living writer, or another user's
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent)


def save_tensors(tensors: Mapping[str, Tensor], path: Path, what: str) -> Path:
    """As safetensors, in the order of their names. Raises StorageError where there is no room."""
    ready = {name: tensors[name].detach().cpu().contiguous() for name in sorted(tensors)}
    try:
        save_file(ready, path, {"format": "pt"})
    except (OSError, SafetensorError) as error:
        raise _no_room(path.parent, error, what) from None
    return path


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def _no_room(folder: Path | None, error: Exception, what: str) -> StorageError:
    where = folder or tempfile.gettempdir()
    # The library that writes safetensors wraps what the system said in words of its own.
    full = any(
        getattr(error, "errno", None) == number or f"os error {number}" in str(error) for number in NO_SPACE
    )
    return StorageError(
        FailureReason.INSUFFICIENT_SPACE if full else FailureReason.UPLOAD_FAILED,
        f"the {what} cannot be written to {where} before its upload: {error}; give the worker more scratch space",
    )
