"""What the frozen base thinks of rows, on the worker's disk: a restarted worker spends no forward on rows that are known.

A file is named by all that decides what is in it: namespace, rows, the adapter that is the reference if one is, and the
base at one commit. Of a base without a commit nothing is kept, since its files may change under the same name. A file is
whole once it has its name; the least recently used ones go when there are more bytes than allowed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import uuid
from pathlib import Path

import numpy as np
import numpy.typing as npt

log = logging.getLogger(__name__)

MOST_BYTES = 512 * 2**20
_LAYOUT = 1
_VALUE_BYTES = 8


class ReferenceFiles:
    def __init__(
        self, folder: Path | None = None, base: str | None = None, most_bytes: int = MOST_BYTES
    ) -> None:
        """``base``: what tells one base from another; None, or no ``folder``: nothing is kept."""
        self._folder = folder if base is not None else None
        self._base, self._most_bytes = base, most_bytes

    @property
    def keeps(self) -> bool:
        return self._folder is not None

    def read(
        self, namespace: str, rows: str, adapter: str | None, count: int, answers: int
    ) -> npt.NDArray[np.float64] | None:
        """[count, answers], NaN where nothing is known. ``rows``, ``adapter``: their digests; ``answers``: of each row.
        None: nothing is kept of these."""
        if self._folder is None:
            return None
        path = self._path(self._folder, namespace, rows, adapter)
        try:
            content = path.read_bytes()
            os.utime(path)
        except OSError:
            return None
        if len(content) != count * answers * _VALUE_BYTES:
            log.warning("%s is not whole and is ignored", path)
            return None
        return np.frombuffer(content, "<f8").reshape(count, answers).copy()

    def write(self, namespace: str, rows: str, adapter: str | None, values: npt.NDArray[np.float64]) -> None:
        """``values`` as ``read`` gives them. What cannot be written is computed again one day."""
        if self._folder is None or values.nbytes > self._most_bytes:
            return
        path = self._path(self._folder, namespace, rows, adapter)
        partial = path.with_name(f"{uuid.uuid4().hex}.partial")
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            partial.touch(mode=0o600)
            partial.write_bytes(values.astype("<f8", copy=False).tobytes())
            partial.rename(path)
            self._prune(self._folder, path)
        except OSError as error:
            log.warning("what the reference thinks of rows cannot be kept: %s", error)
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)

    def _path(self, folder: Path, namespace: str, rows: str, adapter: str | None) -> Path:
        facts = json.dumps([_LAYOUT, namespace, rows, adapter, self._base])
        return folder / f"{hashlib.sha256(facts.encode()).hexdigest()}.f8"

    def _prune(self, folder: Path, spare: Path) -> None:
        found = sorted(
            ((path.stat().st_mtime, path.stat().st_size, path) for path in folder.iterdir()), reverse=True
        )
        held = spare.stat().st_size
        for _, size, path in found:
            if path == spare:
                continue
            held += size
            if held > self._most_bytes:
                path.unlink(missing_ok=True)
