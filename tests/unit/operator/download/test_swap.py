"""One folder in place of another."""

from __future__ import annotations

import threading
from pathlib import Path

from mlora_operator.download import swap


def folder(path: Path, content: str) -> Path:
    path.mkdir()
    (path / "a").write_text(content)
    (path / "b").write_text(content)
    return path


def test_the_new_folder_takes_an_empty_place(tmp_path: Path) -> None:
    swap.put_in_place(folder(tmp_path / "new", "1"), tmp_path / "target")
    assert (tmp_path / "target" / "a").read_text() == "1"
    assert not (tmp_path / "new").exists()


def test_a_reader_finds_a_whole_folder_at_every_moment(tmp_path: Path) -> None:
    target = folder(tmp_path / "target", "0")
    probe = folder(tmp_path / "probe", "p")
    if not swap.exchange(probe, target):
        return  # this file system cannot; the next test is about it
    swap.exchange(probe, target)
    ended, missed = threading.Event(), list[str]()

    def read() -> None:
        while not ended.is_set():
            try:
                (target / "a").read_text()
            except FileNotFoundError:
                missed.append("a")

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(60):
        swap.put_in_place(folder(tmp_path / "new", str(number)), target)
    ended.set()
    reader.join()
    assert missed == []
    assert (target / "b").read_text() == "59"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["probe", "target"]


def test_where_names_cannot_be_exchanged_the_former_folder_is_moved_away(tmp_path: Path) -> None:
    target = folder(tmp_path / "target", "0")
    swap.put_in_place(folder(tmp_path / "new", "1"), target, exchange=lambda *_: False)
    assert (target / "a").read_text() == "1"
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
