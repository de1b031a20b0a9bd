"""Files on the worker's own disk on their way to a store."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from mlora_worker.protocol import FailureReason
from mlora_worker.storage.errors import StorageError

_PIECE = 8 * 2**20


@contextmanager
def scratch_folder(parent: Path | None, what: str) -> Iterator[Path]:
    """A folder that vanishes with the block; in the system's temporary one without ``parent``. ``what`` is for messages,
    such as "adapter". Raises StorageError where there is no room for it."""
    try:
        folder = tempfile.TemporaryDirectory(dir=parent, prefix=f"{what}-")
    except OSError as error:
        raise _no_room(parent, error, what) from None
    with folder as name:
        yield Path(name)


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
    return StorageError(
        FailureReason.UPLOAD_FAILED,
        f"the {what} cannot be written to {where} before its upload: {error}; give the worker more scratch space",
    )
