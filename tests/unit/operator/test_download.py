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
    StoreRefused,
    download,
    open_source,
    read_manifest,
)

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
    download(source, read_manifest(source), target, progress)


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
    "a file outside": (lambda folder: write_manifest(folder, {"../evil": "0" * 64}), "outside"),
    "an absolute file": (lambda folder: write_manifest(folder, {"/etc/passwd": "0" * 64}), "outside"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_damage_is_named_and_the_former_adapter_stays(published: Path, tmp_path: Path, case: str) -> None:
    damage, words = DAMAGES[case]
    target = tmp_path / "got"
    fetch(published, target)
    damage(published)
    with pytest.raises(AdapterCorrupt, match=words):
        fetch(published, target)
    assert (target / "adapter_model.safetensors").read_bytes() == WEIGHTS
    assert leftovers(target) == []


def test_without_a_manifest_there_is_no_adapter(published: Path, tmp_path: Path) -> None:
    (published / "manifest.json").unlink()
    with pytest.raises(AdapterNotFound, match="no finished adapter"):
        fetch(published, tmp_path / "got")


def test_a_store_that_breaks_off_leaves_nothing(published: Path, tmp_path: Path) -> None:
    class Breaking:
        def read(self, name: str) -> Iterator[bytes]:  # noqa: ARG002 - the protocol's signature
            yield b"x"
            raise StoreRefused("connection lost")

    manifest = read_manifest(open_source(published.as_uri(), Access()))
    with pytest.raises(StoreRefused):
        download(Breaking(), manifest, tmp_path / "got")
    assert not (tmp_path / "got").exists()
    assert leftovers(tmp_path / "got") == []


@pytest.mark.parametrize("uri", ["adapters/a", "http://x/y", "s3://", "file://relative"])
def test_an_address_that_is_none_is_refused(uri: str) -> None:
    with pytest.raises(ValueError, match="is no address"):
        open_source(uri, Access())


def test_keys_are_not_shown() -> None:
    assert "hidden" not in repr(
        Access(access_key="hidden-a", secret_key="hidden-b", session_token="hidden-c")
    )
