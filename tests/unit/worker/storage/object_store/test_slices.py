"""Part of a file as the SDK takes a body."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlora_worker.storage.object_store.slices import FileSlice


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "file"
    made.write_bytes(bytes(range(100)))
    return made


def test_it_has_its_bytes_and_no_others(path: Path) -> None:
    with FileSlice(path, 10, 20) as one:
        assert len(one) == 20
        assert one.read(5) == bytes(range(10, 15))
        assert one.tell() == 5
        assert one.read() == bytes(range(15, 30))
        assert one.read(9) == b""


@pytest.mark.parametrize(
    ("offset", "whence", "at"), [(3, 0, 3), (-2, 2, 18), (0, 2, 20), (-99, 1, 0), (40, 0, 40)]
)
def test_it_can_be_sent_again_from_anywhere(path: Path, offset: int, whence: int, at: int) -> None:
    with FileSlice(path, 10, 20) as one:
        one.read(7)
        assert one.seek(offset, whence) == one.tell() == at
        assert one.read() == bytes(range(10 + at, 30))


def test_an_empty_one_is_a_body_too(path: Path) -> None:
    with FileSlice(path, 0, 0) as one:
        assert (len(one), bool(one), one.read()) == (0, True, b"")


def test_a_file_that_is_shorter_gives_what_it_has(path: Path) -> None:
    with FileSlice(path, 90, 20) as one:
        assert one.read() == bytes(range(90, 100))
