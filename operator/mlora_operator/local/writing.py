"""Files whose name is in the error when they cannot be written: a full disk is noticed by a write, which names none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Raises what is raised in it, an OSError with the name of ``path`` where it has none."""
    try:
        yield path
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise
