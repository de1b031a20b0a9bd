"""Part of a local file, read as it is sent: uploads to a slow store are many at once, and each would else be in memory."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any


class FileSlice(io.RawIOBase):
    """``size`` bytes of ``path`` from ``start``, as the SDK takes a body. To be closed. Raises OSError."""

    def __init__(self, path: Path, start: int, size: int) -> None:
        super().__init__()
        self._file = path.open("rb", buffering=0)
        self._start, self._size, self._at = start, size, 0

    def __len__(self) -> int:
        return self._size

    def __bool__(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self._size - self._at)]
        count = os.preadv(self._file.fileno(), [view], self._start + self._at) if view else 0
        self._at += count
        return count

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def close(self) -> None:
        self._file.close()
        super().close()
