"""An adapter arrives whole and verified, or not at all."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mlora_operator.download import (
    Access,
    AdapterCorrupt,
    AdapterNotFound,
    FolderInUse,
    Manifest,
    StoreSilent,
    download,
    open_source,
    read_manifest,
)
from mlora_operator.download.files import check_replaceable

WEIGHTS = b"w" * 3_000_000
CONFIG = b'{"r": 8}'


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """A finished adapter in a folder."""
    folder = tmp_path / "store"
    folder.mkdir()
    files = {"adapter_model.safetensors": WEIGHTS, "adapter_config.json": CONFIG}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    write_manifest(folder, {name: hashlib.sha256(content).hexdigest() for name, content in files.items()})
    return folder


def write_manifest(folder: Path, digests: dict[str, str], **changes: Any) -> None:
    manifest = {
        "taskUid": "u",
        "namespace": "default",
        "name": "a",
        "fingerprint": "f",
        "baseModel": "m",
        "step": 12,
        "loss": 1.5,
        "files": [
            {
                "name": name,
                "bytes": (folder / name).stat().st_size if (folder / name).exists() else 1,
                "sha256": digest,
            }
            for name, digest in digests.items()
        ],
        **changes,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))


def fetch(folder: Path, target: Path, progress: Callable[[int], None] = lambda _: None) -> None:
    source = open_source(folder.as_uri(), Access())
    download(source, read_manifest(source), target, no_pause, progress)


def no_pause(_: float) -> None:
    pass


def leftovers(target: Path) -> list[str]:
    return [path.name for path in target.parent.iterdir() if path.name.startswith(f".{target.name}.")]


def test_all_files_and_the_manifest_arrive(published: Path, tmp_path: Path) -> None:
    target, sizes = tmp_path / "deep" / "er" / "got", list[int]()
    fetch(published, target, sizes.append)
    assert {path.name for path in target.iterdir()} == {
        "adapter_model.safetensors",
        "adapter_config.json",
        "manifest.json",
    }
    assert (target / "adapter_model.safetensors").read_bytes() == WEIGHTS
    assert sum(sizes) == len(WEIGHTS) + len(CONFIG)
    assert len(sizes) > 2
    assert json.loads((target / "manifest.json").read_text())["taskUid"] == "u"
    assert leftovers(target) == []


def test_a_former_adapter_is_replaced(published: Path, tmp_path: Path) -> None:
    target = tmp_path / "got"
    fetch(published, target)
    (target / "old.bin").write_bytes(b"x")
    fetch(published, target)
    assert not (target / "old.bin").exists()
    assert leftovers(target) == []


def test_an_empty_folder_is_used(published: Path, tmp_path: Path) -> None:
    (tmp_path / "got").mkdir()
    fetch(published, tmp_path / "got")
    assert (tmp_path / "got" / "adapter_config.json").read_bytes() == CONFIG


@pytest.mark.parametrize("what", ["folder", "file"])
def test_what_is_not_an_adapter_is_not_overwritten(published: Path, tmp_path: Path, what: str) -> None:
    target = tmp_path / "got"
    if what == "folder":
        target.mkdir()
        (target / "thesis.tex").write_text("years of work")
    else:
        target.write_text("years of work")
    with pytest.raises(FolderInUse, match=str(target)):
        fetch(published, target)
    assert (target / "thesis.tex" if what == "folder" else target).read_text() == "years of work"


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a flipped byte": (
        lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"v" + WEIGHTS[1:]),
        "SHA-256",
    ),
    "a cut file": (
        lambda folder: (folder / "adapter_model.safetensors").write_bytes(WEIGHTS[:-1]),
        "2999999 bytes",
    ),
    "a missing file": (lambda folder: (folder / "adapter_config.json").unlink(), "not in the store"),
    "a manifest of something else": (
        lambda folder: (folder / "manifest.json").write_text('{"a": 1}'),
        "not an adapter's manifest",
    ),
    "a manifest that is not JSON": (
        lambda folder: (folder / "manifest.json").write_text("{"),
        "not an adapter's manifest",
    ),
    "a file outside": (lambda folder: write_manifest(folder, {"../evil": "0" * 64}), "no adapter has"),
    "an absolute file": (lambda folder: write_manifest(folder, {"/etc/passwd": "0" * 64}), "no adapter has"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_damage_is_named_and_the_former_adapter_stays(published: Path, tmp_path: Path, case: str) -> None:
    damage, words = DAMAGES[case]
    target = tmp_path / "got"
    fetch(published, target)
    (target / "manifest.json").write_text((target / "manifest.json").read_text() + " ")  # another one
    damage(published)
    with pytest.raises(AdapterCorrupt, match=words):
        fetch(published, target)
    assert (target / "adapter_model.safetensors").read_bytes() == WEIGHTS
    assert leftovers(target) == []


def test_without_a_manifest_there_is_no_adapter(published: Path, tmp_path: Path) -> None:
    (published / "manifest.json").unlink()
    with pytest.raises(AdapterNotFound, match="no finished adapter"):
        fetch(published, tmp_path / "got")


class Breaking:
    """A store whose connection breaks after ``pieces`` pieces of ``size`` bytes, each time it is asked."""

    def __init__(self, folder: Path, pieces: int, size: int = 1_000_000) -> None:
        self._folder = folder
        self._pieces = pieces
        self._size = size
        self.asked: list[tuple[str, int]] = []

    def read(self, name: str, start: int = 0) -> Iterator[bytes]:
        self.asked.append((name, start))
        content = (self._folder / name).read_bytes()[start:]
        for number in range(self._pieces):
            piece = content[number * self._size : (number + 1) * self._size]
            if not piece:
                return
            yield piece
        if len(content) > self._pieces * self._size:
            raise StoreSilent("connection lost")


def manifest_of(folder: Path) -> Manifest:
    return read_manifest(open_source(folder.as_uri(), Access()))


def test_a_connection_that_breaks_is_gone_on_with_where_it_broke(published: Path, tmp_path: Path) -> None:
    store, sizes, pauses = Breaking(published, pieces=1), list[int](), list[float]()
    download(store, manifest_of(published), tmp_path / "got", pauses.append, sizes.append)
    weights = [start for name, start in store.asked if name == "adapter_model.safetensors"]
    assert weights == [0, 1_000_000, 2_000_000]
    assert (tmp_path / "got" / "adapter_model.safetensors").read_bytes() == WEIGHTS
    assert sum(sizes) == len(WEIGHTS) + len(CONFIG)
    assert len(pauses) == 2


def test_a_store_from_which_something_comes_is_not_given_up(published: Path, tmp_path: Path) -> None:
    store, pauses = Breaking(published, pieces=1, size=300_000), list[float]()
    download(store, manifest_of(published), tmp_path / "got", pauses.append)
    assert (tmp_path / "got" / "adapter_model.safetensors").read_bytes() == WEIGHTS
    assert pauses == [1.0] * 9


def test_a_store_that_never_answers_is_given_up(published: Path, tmp_path: Path) -> None:
    store, pauses = Breaking(published, pieces=0), list[float]()
    with pytest.raises(StoreSilent):
        download(store, manifest_of(published), tmp_path / "got", pauses.append)
    assert len(store.asked) == 5
    assert pauses == sorted(pauses)
    assert not (tmp_path / "got").exists()


class Killed(BaseException):
    pass


def broken_off(published: Path, target: Path) -> None:
    """A download that ends after a million bytes of the weights."""

    def kill(_: float) -> None:
        raise Killed

    with pytest.raises(Killed):
        download(Breaking(published, pieces=1), manifest_of(published), target, kill)


def test_what_a_killed_download_got_is_not_fetched_again(published: Path, tmp_path: Path) -> None:
    target = tmp_path / "got"
    broken_off(published, target)
    assert not target.exists()
    store, sizes = Breaking(published, pieces=9), list[int]()
    download(store, manifest_of(published), target, no_pause, sizes.append)
    assert store.asked == [("adapter_model.safetensors", 1_000_000), ("adapter_config.json", 0)]
    assert sum(sizes) == len(WEIGHTS) + len(CONFIG)
    assert (target / "adapter_model.safetensors").read_bytes() == WEIGHTS
    assert leftovers(target) == []


def test_a_beginning_that_is_of_something_else_is_fetched_again(published: Path, tmp_path: Path) -> None:
    target = tmp_path / "got"
    broken_off(published, target)
    (partial,) = target.parent.glob(".got.partial-*")
    (partial / "adapter_model.safetensors").write_bytes(b"x" * 1_000_000)
    fetch(published, target)
    assert (target / "adapter_model.safetensors").read_bytes() == WEIGHTS


def test_the_beginning_of_another_adapter_is_not_used_and_removed(published: Path, tmp_path: Path) -> None:
    target = tmp_path / "got"
    broken_off(published, target)
    (published / "adapter_model.safetensors").write_bytes(b"other")
    digests = {"adapter_config.json": CONFIG, "adapter_model.safetensors": b"other"}
    digests_of = {name: hashlib.sha256(content).hexdigest() for name, content in digests.items()}
    write_manifest(published, digests_of, taskUid="v")
    fetch(published, target)
    assert (target / "adapter_model.safetensors").read_bytes() == b"other"
    assert leftovers(target) == []


@pytest.mark.parametrize("named", [(), ("adapter_config.json",), ("adapter_model.safetensors",)])
def test_what_has_no_weights_or_no_config_replaces_no_adapter(
    published: Path, tmp_path: Path, named: tuple[str, ...]
) -> None:
    target = tmp_path / "got"
    fetch(published, target)
    digests = {name: hashlib.sha256((published / name).read_bytes()).hexdigest() for name in named}
    write_manifest(published, digests, taskUid="v")
    with pytest.raises(AdapterCorrupt, match=r"names no adapter_.*, so there is no adapter to load"):
        fetch(published, target)
    assert (target / "adapter_model.safetensors").read_bytes() == WEIGHTS
    assert leftovers(target) == []


def test_two_downloads_to_one_place_do_not_mix(published: Path, tmp_path: Path) -> None:
    target = tmp_path / "got"

    def meanwhile(_: int) -> None:
        with pytest.raises(FolderInUse, match="another download"):
            fetch(published, target)

    fetch(published, target, meanwhile)
    assert (target / "adapter_model.safetensors").read_bytes() == WEIGHTS


def test_what_is_there_already_is_not_fetched_again(published: Path, tmp_path: Path) -> None:
    target = tmp_path / "got"
    fetch(published, target)
    store = Breaking(published, pieces=0)
    download(store, manifest_of(published), target, no_pause)
    assert store.asked == []
    (target / "adapter_config.json").write_bytes(b'{"r": 9}')
    fetch(published, target)
    assert (target / "adapter_config.json").read_bytes() == CONFIG


def test_a_symbolic_link_leads_to_the_new_adapter(published: Path, tmp_path: Path) -> None:
    (tmp_path / "version-1").mkdir()
    (tmp_path / "current").symlink_to("version-1")
    fetch(published, tmp_path / "current")
    assert (tmp_path / "current").is_symlink()
    assert (tmp_path / "version-1" / "adapter_config.json").read_bytes() == CONFIG


def test_a_mount_point_is_refused_with_a_folder_to_use() -> None:
    with pytest.raises(FolderInUse, match="use /proc/adapter"):
        check_replaceable(Path("/proc"))


@pytest.mark.parametrize("uri", ["adapters/a", "http://x/y", "s3://", "file://relative"])
def test_an_address_that_is_none_is_refused(uri: str) -> None:
    with pytest.raises(ValueError, match="is not the address"):
        open_source(uri, Access())


def test_keys_are_not_shown() -> None:
    assert "hidden" not in repr(
        Access(access_key="hidden-a", secret_key="hidden-b", session_token="hidden-c")
    )
