"""Tokenised rows that are kept on the worker's disk, so that a task which comes again need not be tokenised again.

A folder is named by all that decides what is in it, see ``key_of``: the bytes that were read, the tokenizer, the template,
the options. Namespaces share none, and what is asked for is given only after the task's own keys have read its source's
version. A folder is complete once it has its name; a file of it is readable by its owner alone. The least recently used
ones go when there are more bytes than allowed, or less than a tenth of the disk is free; rows that are in use stay mapped
though their names are gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlora_worker.data.training_rows.row_files import FolderWriter, open_rows
from mlora_worker.data.training_rows.token_rows import TokenRows
from mlora_worker.protocol import Amount, DataCounts, Message
from mlora_worker.storage.versioned_json import read_document

log = logging.getLogger(__name__)

LAYOUT = 6  # of the files, and of the rules by which rows become tokens: another number, other folders
DEFAULT_BYTES = 20 * 2**30
_META = "meta.json"
_UNFINISHED = ".partial"
_FREE_SHARE = 10  # a tenth of the volume stays free for what else is written there
_ABANDONED_SECONDS = 24 * 3600.0  # since the last change of an unfinished folder: its writer is dead


class _Meta(Message):
    counts: DataCounts
    digest: str
    rows: Amount


@dataclass(frozen=True, slots=True)
class Kept:
    rows: TokenRows
    counts: DataCounts


def _volume_of(folder: Path) -> tuple[int, int]:
    usage = shutil.disk_usage(folder)
    return usage.total, usage.free


class RowCache:
    """The part of one namespace. ``folder`` belongs to the caches alone; several processes may use it at once."""

    def __init__(
        self,
        folder: Path,
        namespace: str,
        most_bytes: int = DEFAULT_BYTES,
        clock: Callable[[], float] = time.time,
        writer: Callable[[Path, int], FolderWriter] = FolderWriter,
        volume: Callable[[Path], tuple[int, int]] = _volume_of,
        opened: Callable[[Path, str], TokenRows] = open_rows,
    ) -> None:
        """``most_bytes`` of all namespaces together, so of any one data set, too. ``volume``: bytes of a folder's volume,
        and how many of them are free. ``opened`` gives the rows of a folder, see ``open_rows``."""
        self._root = folder
        self._folder = folder / hashlib.sha256(namespace.encode()).hexdigest()[:16]
        self._most_bytes = most_bytes
        self._clock = clock
        self._writer = writer
        self._volume = volume
        self._opened = opened

    def find(self, key: str) -> Kept | None:
        place = self._folder / key
        try:
            meta = read_document(_Meta, (place / _META).read_bytes())
            rows = self._opened(place, meta.digest)
            if len(rows) != meta.rows:
                raise ValueError(f"{place} is incomplete")
            os.utime(place)
        except (OSError, ValueError) as error:
            if place.exists():
                log.warning("the tokenised rows in %s are ignored: %s", place, error)
                # What cannot be read for the moment, such as for want of open files, is not damaged.
                if isinstance(error, ValueError | FileNotFoundError):
                    shutil.rmtree(place, ignore_errors=True)
            return None
        return Kept(rows, meta.counts)

    @contextmanager
    def writing(self) -> Iterator[FolderWriter]:
        """A writer whose folder vanishes unless ``keep`` gave it a name. Raises OSError when the disk is full; the writer
        takes no more than all namespaces together may keep."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _unfinished(self._folder) as place:
                self.prune()
                writer = self._writer(place, self._most_bytes)
                writer.opened = self._opened
                try:
                    yield writer
                finally:
                    writer.close()
        except OSError as error:
            raise OSError(
                error.errno,
                f"the tokenised rows cannot be written to {self._folder}: {error.strerror}; give the worker more "
                f"scratch "
                "space",
            ) from None

    def keep(self, key: str, writer: FolderWriter, rows: TokenRows, counts: DataCounts) -> None:
        """Names what ``writer`` has finished. Whoever was first wins: the content is the same."""
        meta = _Meta(counts=counts, digest=rows.digest(), rows=len(rows))
        path = writer.folder / _META
        path.touch(mode=0o600)
        path.write_text(meta.to_json(), encoding="utf-8")
        with contextlib.suppress(OSError):  # it is there already
            writer.folder.rename(self._folder / key)
        self.prune(spare=key)

    def prune(self, most_bytes: int | None = None, spare: str = "") -> None:
        """Removes the least recently used folders until the rest has at most ``most_bytes`` (None: as much as it may have
        now); never ``spare``, nor one that is being written, though that counts."""
        found: list[tuple[float, int, Path]] = []
        held = 0
        now = self._clock()
        for place in self._root.glob("*/*"):
            with contextlib.suppress(OSError):
                used = place.stat().st_mtime
                if place.suffix == _UNFINISHED and _remove_if_abandoned(place, now):
                    continue
                size = sum(file.stat().st_size for file in place.iterdir())
                held += size
                if place.suffix != _UNFINISHED and place != self._folder / spare:
                    found.append((used, size, place))
        if most_bytes is None:
            whole, free = self._volume(self._root)
            most_bytes = min(self._most_bytes, held + free - whole // _FREE_SHARE)
        for _, size, place in sorted(found):
            if held <= most_bytes:
                return
            shutil.rmtree(place, ignore_errors=True)
            held -= size


def sweep(root: Path, clock: Callable[[], float] = time.time) -> None:
    """Removes below the folder of all caches what those have left who were killed while they wrote."""
    for place in root.glob(f"*/*{_UNFINISHED}"):
        with contextlib.suppress(OSError):
            _remove_if_abandoned(place, clock())


@contextmanager
def _unfinished(folder: Path) -> Iterator[Path]:
    """A new folder that vanishes, unless it has another name by then. A lock on it says that somebody writes there; it ends
    with its holder, however that ends."""
    with contextlib.ExitStack() as lock:
        place = _begun(folder, lock)
        try:
            yield place
        finally:
            shutil.rmtree(place, ignore_errors=True)


def _begun(folder: Path, lock: contextlib.ExitStack) -> Path:
    while True:
        place = folder / f"{uuid.uuid4().hex}{_UNFINISHED}"
        place.mkdir(mode=0o700)
        with contextlib.suppress(FileNotFoundError):  # removed as abandoned before it was locked, as below
            if lock.enter_context(_locked(place)) and place.exists():
                return place


@contextmanager
def _locked(place: Path) -> Iterator[bool]:
    """False where somebody else holds the lock. Raises FileNotFoundError."""
    file = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = True
        except BlockingIOError:
            held = False
        yield held
    finally:
        os.close(file)


def _remove_if_abandoned(place: Path, now: float) -> bool:
    """An unfinished folder that nobody writes any more. Raises OSError."""
    if now - place.stat().st_mtime > _ABANDONED_SECONDS:  # it may be on a volume without locks
        shutil.rmtree(place, ignore_errors=True)
        return True
    with _locked(place) as abandoned:
        if abandoned:
            shutil.rmtree(place, ignore_errors=True)
        return abandoned


def key_of(versions: Sequence[tuple[str, str]], tokenizer: str, options: Any) -> str:
    """``versions``: address and version of each file in order; ``tokenizer``: its content's hash; ``options``: JSON of all
    else that decides the tokens."""
    facts = json.dumps([LAYOUT, list(versions), tokenizer, options], sort_keys=True, allow_nan=False)
    return hashlib.sha256(facts.encode()).hexdigest()


def tokenizer_hash(tokenizer: Any) -> str:
    """Of all that decides the tokens: vocabulary, rules, added tokens, special tokens' names, chat template."""
    parts = (
        tokenizer.backend_tokenizer.to_str(),
        json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str),
        json.dumps(tokenizer.chat_template, sort_keys=True, default=str),
    )
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part.encode("utf-8", "surrogatepass")).digest())
    return digest.hexdigest()
