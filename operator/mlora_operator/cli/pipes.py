"""Pipes where files are expected: ``<(command)`` of a shell, a named pipe, or ``-`` for standard input."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path


@cache  # a pipe can be read only once
def as_file(path: str) -> Path:
    """``path`` itself where it is a file, a folder or nothing; else a private file with what the pipe gives, until the
    program ends. Raises OSError.
    """
    found = Path(path)
    if path != "-" and (not found.exists() or found.is_file() or found.is_dir()):
        return found
    folder = tempfile.mkdtemp(prefix="mlora-pipe-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    copy = Path(folder) / "content"
    descriptor = os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as target:
        if path == "-":
            shutil.copyfileobj(sys.stdin.buffer, target)
        else:
            with found.open("rb") as source:
                shutil.copyfileobj(source, target)
    return copy
