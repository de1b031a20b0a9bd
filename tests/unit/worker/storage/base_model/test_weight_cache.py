"""The cache of weights: one volume for several processes and pipelines, bounded, and honest about what is in it."""

from __future__ import annotations

import fcntl
import hashlib
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlora_worker.storage.base_model.weight_cache import CachedFile, CacheFull, WeightCache
from mlora_worker.storage.errors import StoreUnreachable

BLOCK = 4096
CONTENT = os.urandom(10 * BLOCK + 17)
PLENTY = (2**40, 2**40)


class Origin:
    """Where blocks come from; counts them."""

    def __init__(self, content: bytes = CONTENT, seconds: float = 0.0) -> None:
        self.content = content
        self.seconds = seconds
        self.asked: list[tuple[int, int]] = []

    def __call__(self, start: int, length: int) -> Iterator[bytes]:
        self.asked.append((start, length))
        time.sleep(self.seconds)
        yield self.content[start : start + 5]
        yield self.content[start + 5 : start + length]


def cache(folder: Path, most: int = 2**30, room: tuple[int, int] = PLENTY) -> WeightCache:
    return WeightCache(folder, most, block=BLOCK, room=lambda _: room)


def opened(folder: Path, identity: str = "a", size: int = len(CONTENT), most: int = 2**30) -> CachedFile:
    found = cache(folder, most).open(identity, size)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("start", "length", "blocks"),
    [(0, 1, 1), (BLOCK - 1, 2, 2), (BLOCK, BLOCK, 1), (10 * BLOCK, 17, 1), (0, len(CONTENT), 11)],
)
def test_what_is_read_is_the_original_and_only_its_blocks_are_fetched(
    tmp_path: Path, start: int, length: int, blocks: int
) -> None:
    origin, file = Origin(), opened(tmp_path)
    assert file.read(start, length, origin) == CONTENT[start : start + length]
    assert len(origin.asked) == blocks
    assert file.missing == 11 - blocks
    assert opened(tmp_path).read(start, length, origin) == CONTENT[start : start + length]
    assert len(origin.asked) == blocks


def test_a_block_that_was_being_fetched_at_a_kill_is_fetched_anew(tmp_path: Path) -> None:
    def dies(start: int, length: int) -> Iterator[bytes]:
        yield CONTENT[start : start + length // 2]
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        opened(tmp_path).read(0, 10, dies)
    origin = Origin()
    assert opened(tmp_path).read(0, 10, origin) == CONTENT[:10]
    assert origin.asked == [(0, BLOCK)]


def test_threads_and_openers_that_want_the_same_blocks_fetch_each_once(tmp_path: Path) -> None:
    origin = Origin(seconds=0.01)
    wrong: list[int] = []

    def work(file: CachedFile) -> None:
        if file.read(0, len(CONTENT), origin) != CONTENT:
            wrong.append(1)

    files = [opened(tmp_path), opened(tmp_path)]
    threads = [threading.Thread(target=work, args=(file,)) for file in files * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not wrong
    assert len(origin.asked) == 11


def _fill(folder: Path, journal: Path) -> None:
    def fetch(start: int, length: int) -> Iterator[bytes]:
        with journal.open("a") as file:
            file.write(f"{start}\n")
        time.sleep(0.02)
        yield CONTENT_OF_CHILDREN[start : start + length]

    opened(folder, size=len(CONTENT_OF_CHILDREN)).fill(fetch)


CONTENT_OF_CHILDREN = bytes(range(256)) * 160  # the same in each process


def test_processes_that_want_the_same_blocks_fetch_each_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    journal = tmp_path / "journal"
    children = [context.Process(target=_fill, args=(tmp_path / "cache", journal)) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join(20)
    assert [child.exitcode for child in children] == [0, 0, 0]
    starts = journal.read_text().split()
    assert sorted(map(int, starts)) == list(range(0, len(CONTENT_OF_CHILDREN), BLOCK))


def test_the_least_recently_used_files_go_and_those_in_use_stay(tmp_path: Path) -> None:
    size = 8 * BLOCK
    content = CONTENT[:size]
    for age, identity in enumerate(("old", "used", "new")):
        file = opened(tmp_path, identity, size)
        file.fill(Origin(content))
        moment = time.time() - 100 + age
        os.utime(file._paths[1], (moment, moment))
        if identity == "used":
            keep = file
        else:
            close(file)
    os.utime(keep._paths[1], (0, 0))  # older than the old one, but in use
    opened(tmp_path, "more", size, most=3 * size)
    left = {path.name for path in tmp_path.glob("*.data")}
    assert keep._paths[0].name in left
    assert len(left) == 3
    assert not (tmp_path / "old.data").exists()
    assert opened(tmp_path, "old", size).missing == 8
    assert opened(tmp_path, "new", size).missing == 0


def close(file: CachedFile) -> None:
    """As the end of its process would."""
    os.close(file._data)
    os.close(file._sums)


@pytest.mark.parametrize(
    ("most", "room"),
    [
        (len(CONTENT) - 1, PLENTY),
        (2**30, (len(CONTENT) - 1, 2**20)),
        (2**30, (len(CONTENT) + 100, 10 * 2**20)),  # a tenth of the volume stays free
    ],
)
def test_a_file_that_would_not_fit_is_not_begun(tmp_path: Path, most: int, room: tuple[int, int]) -> None:
    assert cache(tmp_path, most, room).open("a", len(CONTENT)) is None
    assert not list(tmp_path.glob("*.data"))


def test_a_file_that_is_too_large_to_be_kept_sends_no_other_away(tmp_path: Path) -> None:
    kept = opened(tmp_path, "small", BLOCK)
    kept.fill(Origin(CONTENT[:BLOCK]))
    close(kept)
    assert cache(tmp_path, 2 * BLOCK).open("large", 8 * BLOCK) is None
    assert opened(tmp_path, "small", BLOCK).missing == 0


def test_what_a_kill_left_of_a_removal_is_removed_with_its_turn(tmp_path: Path) -> None:
    half = opened(tmp_path, "half", 4 * BLOCK)
    half.fill(Origin(CONTENT[: 4 * BLOCK]))
    close(half)
    half._paths[1].unlink()
    os.utime(half._paths[0], (0, 0))
    assert cache(tmp_path, 4 * BLOCK).open("next", 4 * BLOCK) is not None
    assert not half._paths[0].exists()


def test_bytes_are_locked_in_a_file_that_nobody_locks_as_a_whole(tmp_path: Path) -> None:
    """Where a lock of the file is one of all its bytes, two processes would else wait for each other."""
    file = opened(tmp_path, "a", BLOCK)
    with file._paths[1].open("r+b") as sums:
        fcntl.flock(sums, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with file._paths[0].open("r+b") as data, pytest.raises(BlockingIOError):
        fcntl.flock(data, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_volume_that_fills_up_meanwhile_is_told_apart_from_a_server_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    file = opened(tmp_path)
    monkeypatch.setattr("mlora_worker.storage.base_model.weight_cache.os.pwrite", full)
    with pytest.raises(CacheFull, match="No space left"):
        file.read(0, 1, Origin())


def test_a_sum_is_looked_at_once_and_remembered(tmp_path: Path) -> None:
    right, file = hashlib.sha256(CONTENT).hexdigest(), opened(tmp_path)
    file.fill(Origin())
    assert not file.matches("0" * 64)
    assert not file.is_known(right)
    assert file.matches(right)
    assert opened(tmp_path).is_known(right)


def test_a_whole_file_comes_from_a_server_that_gives_no_parts(tmp_path: Path) -> None:
    file = opened(tmp_path)
    file.take_whole(iter([CONTENT[:9000], CONTENT[9000:9001], CONTENT[9001:]]))
    assert file.missing == 0
    assert file.read(0, len(CONTENT), Origin(b"")) == CONTENT
    with pytest.raises(StoreUnreachable, match="ended after 9000 bytes"):
        opened(tmp_path, "b").take_whole(iter([CONTENT[:9000]]))
    with pytest.raises(StoreUnreachable, match="has more than"):
        opened(tmp_path, "c").take_whole(iter([CONTENT, b"x"]))
