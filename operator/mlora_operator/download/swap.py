"""One folder in place of another, in one step where the system can."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def exchange(one: Path, other: Path) -> bool:
    """Both names change places at once; False where that cannot be done."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        renameat2 = ctypes.CDLL(None).renameat2
    except (OSError, AttributeError):  # a C library without it
        return False
    return bool(renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0)


def put_in_place(new: Path, target: Path, exchange: Callable[[Path, Path], bool] = exchange) -> None:
    """``new`` becomes ``target``; what was there is removed.

    On Linux the two names are exchanged by one system call (renameat2), so that a reader sees the former folder
    or the new one at every moment. Where the file system has no exchange, the former one is moved away first,
    and for an instant there is none. A mixture is never seen.
    """
    if not target.exists():
        new.rename(target)
    elif exchange(new, target):
        shutil.rmtree(new)
    else:
        away = Path(tempfile.mkdtemp(prefix=f".{target.name}.old-", dir=target.parent))
        target.rename(away / target.name)
        new.rename(target)
        shutil.rmtree(away)
