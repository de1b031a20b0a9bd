"""The folder of shown adapters: readers see the former version or the new one, and what is not ours stays."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlora_operator.download import Access, AdapterCorrupt, FolderInUse, Manifest, open_source, read_manifest
from mlora_operator.sync.folder import FolderLocked, ShownAdapters, digest_of, open_folder
from tests.fixtures.published import publish


@pytest.fixture
def shown(tmp_path: Path) -> Iterator[ShownAdapters]:
    with open_folder(tmp_path / "shown") as folder:
        yield folder


def add(shown: ShownAdapters, published: Path) -> Manifest:
    source = open_source(published.as_uri(), Access())
    manifest = read_manifest(source)
    shown.add("bot", manifest, source, lambda _: None)
    return manifest


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_an_adapter_is_shown_under_its_name_and_its_version_has_a_path_of_its_own(
    shown: ShownAdapters, tmp_path: Path
) -> None:
    first = add(shown, publish(tmp_path / "store", b"first"))
    second = add(shown, publish(tmp_path / "store", b"second"))
    assert shown.shown() == {"bot": digest_of(second)}
    assert (shown.folder / "bot" / "adapter_model.safetensors").read_bytes() == b"second"
    former = shown.folder / shown.path("bot", digest_of(first))
    assert (former / "adapter_model.safetensors").read_bytes() == b"first"
    assert not (shown.folder / "bot").readlink().is_absolute()  # the volume may be mounted elsewhere


def test_a_reader_finds_a_whole_adapter_at_every_moment(shown: ShownAdapters, tmp_path: Path) -> None:
    stores = [publish(tmp_path / name, name.encode() * 1000) for name in ("a", "b")]
    add(shown, stores[0])
    wrong: list[str] = []
    end = threading.Event()

    def read() -> None:
        while not end.is_set():
            try:
                content = (shown.folder / "bot" / "adapter_model.safetensors").read_bytes()
                if content not in (b"a" * 1000, b"b" * 1000):
                    wrong.append(f"{len(content)} bytes")
            except OSError as error:
                wrong.append(str(error))

    reader = threading.Thread(target=read)
    reader.start()
    for turn in range(1500):
        add(shown, stores[turn % 2])
    end.set()
    reader.join()
    assert wrong == []


def test_what_is_corrupt_is_not_shown_and_what_was_shown_stays(shown: ShownAdapters, tmp_path: Path) -> None:
    first = add(shown, publish(tmp_path / "store", b"first"))
    store = publish(tmp_path / "store", b"second")
    (store / "adapter_model.safetensors").write_bytes(b"secOnd")
    with pytest.raises(AdapterCorrupt, match="does not match the SHA-256"):
        add(shown, store)
    assert shown.shown() == {"bot": digest_of(first)}
    assert (shown.folder / "bot" / "adapter_model.safetensors").read_bytes() == b"first"


def test_a_version_that_was_damaged_is_fetched_again_by_the_next_process(tmp_path: Path) -> None:
    store = publish(tmp_path / "store")
    with open_folder(tmp_path / "shown") as shown:
        add(shown, store)
        weights = shown.folder / "bot" / "adapter_model.safetensors"
        weights.write_bytes(b"wEights")
    with open_folder(tmp_path / "shown") as shown:
        add(shown, store)
        assert weights.read_bytes() == b"weights"


@pytest.mark.parametrize("what", ["folder", "file", "link", "dangling"])
def test_what_others_have_put_under_a_name_stays(shown: ShownAdapters, tmp_path: Path, what: str) -> None:
    there = shown.folder / "bot"
    if what == "folder":
        there.mkdir()
    elif what == "file":
        there.write_text("mine")
    else:
        there.symlink_to(tmp_path if what == "link" else tmp_path / "nowhere")
    before = os.lstat(there)
    with pytest.raises(FolderInUse, match="is not of `mlora sync`"):
        add(shown, publish(tmp_path / "store"))
    assert shown.shown() == {}
    assert os.path.samestat(before, os.lstat(there))


def test_a_link_that_leads_out_of_the_folder_is_not_ours(shown: ShownAdapters) -> None:
    (shown.folder / "bot").symlink_to(".versions/../.versions")
    (shown.folder / "cat").symlink_to("/etc")
    assert shown.shown() == {}


def test_versions_that_nobody_needs_are_removed(shown: ShownAdapters, tmp_path: Path) -> None:
    add(shown, publish(tmp_path / "store", b"first"))
    second = add(shown, publish(tmp_path / "store", b"second"))
    (shown.folder / ".versions" / "gone" / ("0" * 32)).mkdir(parents=True)
    shown.remove_others({("bot", digest_of(second))})
    assert names(shown.folder / ".versions") == ["bot"]
    assert names(shown.folder / ".versions" / "bot") == [digest_of(second)]


def test_a_version_that_was_removed_and_comes_again_is_fetched(shown: ShownAdapters, tmp_path: Path) -> None:
    manifest = add(shown, publish(tmp_path / "store"))
    shown.hide("bot")
    shown.remove_others(set())
    add(shown, tmp_path / "store")
    assert shown.shown() == {"bot": digest_of(manifest)}


def test_two_at_one_folder_do_not_mix(shown: ShownAdapters) -> None:
    with pytest.raises(FolderLocked, match="another `mlora sync` is working on"), open_folder(shown.folder):
        pass


def test_an_adapter_that_does_not_fit_the_volume_is_not_begun(
    shown: ShownAdapters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10))
    with pytest.raises(FolderInUse, match=r"bot needs 15 bytes, and .* has 10 left"):
        add(shown, publish(tmp_path / "store"))
    assert not (shown.folder / ".versions" / "bot").exists()


def test_a_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FolderInUse, match="file cannot be written"), open_folder(tmp_path / "file"):
        pass
