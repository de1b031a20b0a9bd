from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from mlora_worker.protocol import FailureReason
from mlora_worker.storage.errors import ObjectNotFound, StorageError, StoreUnreachable
from mlora_worker.storage.limits import MOST_LISTED
from mlora_worker.storage.object_store.file_store import FileStore, move_into_place
from mlora_worker.storage.remote.line_splitter import split_lines

MOST = 2**20  # bytes

STORE = FileStore()


def test_what_was_written_is_read_back_whole_in_part_and_by_line(tmp_path: Path) -> None:
    uri = (tmp_path / "deep" / "er" / "rows.jsonl").as_uri()
    STORE.write(uri, b"one\ntwo\nthree")
    assert STORE.read(uri, MOST) == b"one\ntwo\nthree"
    assert STORE.read_range(uri, 4, 3) == b"two"
    assert list(split_lines(STORE.pieces(uri))) == [b"one", b"two", b"three"]
    assert STORE.size(uri) == 13
    assert STORE.exists(uri)
    STORE.delete(uri)
    STORE.delete(uri)
    assert not STORE.exists(uri)


def test_a_file_that_ends_too_early_is_an_error(tmp_path: Path) -> None:
    uri = (tmp_path / "x").as_uri()
    STORE.write(uri, b"12345")
    with pytest.raises(StorageError, match="shorter than expected: wanted 4 bytes from 3, got 2"):
        STORE.read_range(uri, 3, 4)


def test_a_write_takes_the_old_files_place_at_once_and_never_changes_it(tmp_path: Path) -> None:
    uri = (tmp_path / "x").as_uri()
    STORE.write(uri, b"old")
    (tmp_path / "opened before").hardlink_to(tmp_path / "x")
    STORE.write(uri, b"new")
    assert STORE.read(uri, MOST) == b"new"
    assert (tmp_path / "opened before").read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["opened before", "x"]


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN])
def test_a_volume_whose_server_is_away_is_a_store_that_gives_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def away(path: str, *_: object) -> int:
        raise OSError(number, os.strerror(number), path)

    monkeypatch.setattr(os, "open", away)
    with pytest.raises(StoreUnreachable, match="check its volume") as caught:
        STORE.read((tmp_path / "x").as_uri(), MOST)
    assert caught.value.reason is FailureReason.STORAGE_UNREACHABLE


def test_a_write_that_breaks_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    uri = (tmp_path / "x").as_uri()
    STORE.write(uri, b"old")
    with pytest.raises(ObjectNotFound):
        STORE.write_file(uri, tmp_path / "no such source")
    assert STORE.read(uri, MOST) == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_leftovers_of_a_killed_writer_are_no_objects_and_go_with_the_next_write(tmp_path: Path) -> None:
    leftover = tmp_path / ".a[1].bin.0123.partial"
    leftover.write_bytes(b"half")
    other = tmp_path / ".a1.bin.0123.partial"
    other.write_bytes(b"another's")
    uri = (tmp_path / "a[1].bin").as_uri()
    assert STORE.list(tmp_path.as_uri(), MOST_LISTED) == []
    STORE.write(uri, b"whole")
    assert not leftover.exists()
    assert other.exists()


def test_a_folder_lists_what_is_below_it_and_not_what_only_begins_like_it(tmp_path: Path) -> None:
    for name in ("run/a", "run/deep/b", "run2/c"):
        STORE.write((tmp_path / name).as_uri(), b"")
    assert STORE.list((tmp_path / "run").as_uri(), MOST_LISTED) == [
        (tmp_path / "run" / name).as_uri() for name in ("a", "deep/b")
    ]
    assert STORE.list((tmp_path / "none").as_uri(), MOST_LISTED) == []


def test_a_missing_file_has_the_reason_that_the_caller_gave(tmp_path: Path) -> None:
    with pytest.raises(ObjectNotFound, match="does not exist") as caught:
        FileStore(FailureReason.INVALID_SPEC).read((tmp_path / "x").as_uri(), MOST)
    assert caught.value.reason is FailureReason.INVALID_SPEC


def test_a_full_volume_is_named(tmp_path: Path) -> None:
    link = tmp_path / "full"
    link.symlink_to("/dev/full")
    with (
        pytest.raises(StorageError, match="no space left on that volume") as caught,
        STORE._explained("x", "write"),
    ):
        link.write_bytes(b"x")
    assert caught.value.reason is FailureReason.INSUFFICIENT_SPACE


@pytest.mark.parametrize("private", [False, True])
def test_private_files_and_their_folders_are_their_owners_alone(tmp_path: Path, private: bool) -> None:
    before = os.umask(0o022)
    try:
        FileStore(private=private).write((tmp_path / "deep" / "er" / "x").as_uri(), b"")
    finally:
        os.umask(before)
    modes = [(tmp_path / name).stat().st_mode & 0o777 for name in ("deep", "deep/er", "deep/er/x")]
    assert modes == ([0o700, 0o700, 0o600] if private else [0o755, 0o755, 0o644])


def test_a_file_that_is_moved_into_place_is_its_owners_alone_and_so_are_the_folders_made_for_it(
    tmp_path: Path,
) -> None:
    source, target = tmp_path / "made", tmp_path / "deep" / "er" / "kept"
    source.write_bytes(b"weights")
    source.chmod(0o644)
    move_into_place(source, target)
    assert (target.read_bytes(), source.exists()) == (b"weights", False)
    modes = [path.stat().st_mode & 0o777 for path in (target, target.parent, target.parent.parent)]
    assert modes == [0o600, 0o700, 0o700]
