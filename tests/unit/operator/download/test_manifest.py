"""What a download reads of an adapter's manifest is what the worker writes."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from mlora_operator.download.errors import AdapterCorrupt
from mlora_operator.download.manifest import (
    FILE_NAME,
    LARGEST,
    LARGEST_FILE,
    LONGEST_FILE_NAME,
    LONGEST_NAME,
    LONGEST_UID,
    MANIFEST_NAME,
    MOST_FILES,
    MOST_STEPS,
    NEEDED,
    parse_manifest,
    read_manifest,
)
from mlora_worker import bounds, protocol
from mlora_worker.protocol import manifest as protocols
from mlora_worker.storage import limits
from mlora_worker.storage.artifacts.adapter import (
    CARD_NAME,
    CONFIG_NAME,
    HISTORY_NAME,
    TEMPLATE_NAME,
    WEIGHTS_NAME,
)

PUBLISHED = (CARD_NAME, CONFIG_NAME, HISTORY_NAME, TEMPLATE_NAME, WEIGHTS_NAME)

WRITTEN = protocol.AdapterManifest(
    task_uid="u",
    namespace="team-a",
    name="a",
    fingerprint="f",
    base_model="m",
    step=12,
    loss=None,
    files=(protocol.ManifestFile(name="adapter_config.json", bytes=1, sha256="0" * 64),),
)


def test_the_workers_own_manifest_is_understood() -> None:
    content = WRITTEN.model_dump_json(by_alias=True).encode()
    read = parse_manifest(content)
    assert (read.task_uid, read.namespace, read.name, read.base_model, read.step) == (
        "u",
        "team-a",
        "a",
        "m",
        12,
    )
    assert [(file.name, file.bytes, file.sha256) for file in read.files] == [
        ("adapter_config.json", 1, "0" * 64)
    ]
    assert read.content == content
    assert protocol.MANIFEST_NAME == MANIFEST_NAME


def test_fields_of_a_later_worker_are_kept() -> None:
    content = json.dumps(json.loads(WRITTEN.model_dump_json(by_alias=True)) | {"evaluation": {"loss": 1}})
    assert parse_manifest(content.encode()).as_json()["evaluation"] == {"loss": 1}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, "version 2; upgrade mlora to read it"),
        ({"step": True}, "not an adapter's manifest"),
        ({"step": 10**400}, "has a step outside 0 to"),
        ({"step": -1}, "has a step outside 0 to"),
        ({"taskUid": "x" * 129}, "taskUid has more than 128 characters"),
        ({"baseModel": "x" * 254}, "baseModel has more than 253 characters"),
        ({"files": [{"name": "a.md", "bytes": "1", "sha256": "0" * 64}]}, "not an adapter's manifest"),
        ({"files": [{"name": "a.md", "bytes": 1, "sha256": "none"}]}, "no SHA-256 for a.md"),
        ({"files": [{"name": "a.md", "bytes": -1, "sha256": "0" * 64}]}, "no size"),
        ({"files": [{"name": "a.md", "bytes": 10**400, "sha256": "0" * 64}]}, "no size"),
        (
            {"files": [{"name": str(n), "bytes": 1, "sha256": "0" * 64} for n in range(1025)]},
            "more than 1,024",
        ),
        ({"files": [{"name": "", "bytes": 1, "sha256": "0" * 64}]}, "no adapter has"),
        ({"files": [{"name": "a\0b", "bytes": 1, "sha256": "0" * 64}]}, "no adapter has"),
        ({"files": [{"name": "a.md", "bytes": 1, "sha256": "0" * 64}] * 2}, "names a.md twice"),
        ({"files": [{"name": "manifest.json", "bytes": 1, "sha256": "0" * 64}]}, "no adapter has"),
    ],
)
def test_what_cannot_be_trusted_is_refused(change: dict[str, object], words: str) -> None:
    content = json.dumps(json.loads(WRITTEN.model_dump_json(by_alias=True)) | change)
    with pytest.raises(AdapterCorrupt, match=words):
        parse_manifest(content.encode())


@pytest.mark.parametrize(
    "name",
    ["../a.md", "/a.md", "a/b.md", ".", "..", "..md", ".bashrc", ".a.md", "a\\b.md", "C:x.md", "json.py", "a.pth", "a.bin",
     "a", "MANIFEST.json", "-a.md", "a b.md", "a.md\n", "\x1b]0;a\x07.md", "\u202edm.md", "a\0.md", "\u0430.md",
     "a" * 126 + ".md"],
)  # fmt: skip
def test_no_name_makes_a_file_that_is_none_of_an_adapter(name: str) -> None:
    file = {"name": name, "bytes": 1, "sha256": "0" * 64}
    content = json.dumps(json.loads(WRITTEN.model_dump_json(by_alias=True)) | {"files": [file]})
    with pytest.raises(AdapterCorrupt, match="names a file that no adapter has"):
        parse_manifest(content.encode())
    if name.casefold() != MANIFEST_NAME:
        with pytest.raises(ValidationError):
            protocol.AdapterManifest.model_validate_json(content)


def test_names_that_differ_in_case_are_one_file() -> None:
    files = [{"name": name, "bytes": 1, "sha256": "0" * 64} for name in ("README.md", "readme.md")]
    content = json.dumps(json.loads(WRITTEN.model_dump_json(by_alias=True)) | {"files": files})
    with pytest.raises(AdapterCorrupt, match=r"readme\.md twice"):
        parse_manifest(content.encode())


@pytest.mark.parametrize(
    "name", [*PUBLISHED, "tokenizer.json", "tokenizer.model", "special_tokens_map.json", "vocab.txt"]
)
def test_what_workers_publish_is_allowed(name: str) -> None:
    written = WRITTEN.model_copy(
        update={"files": (protocol.ManifestFile(name=name, bytes=1, sha256="0" * 64),)}
    )
    (file,) = parse_manifest(written.model_dump_json(by_alias=True).encode()).files
    assert file.name == name


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b'{"taskUid": ' * 100_000])
def test_what_is_no_manifest_is_refused(content: bytes) -> None:
    with pytest.raises(AdapterCorrupt, match="not an adapter's manifest"):
        parse_manifest(content)


class _Endless:
    """A store that sends without an end."""

    def __init__(self) -> None:
        self.sent = 0

    def read(self, name: str, start: int = 0) -> Iterator[bytes]:  # noqa: ARG002 - the protocol's signature
        while self.sent < 64 * LARGEST:
            self.sent += 2**16
            yield b" " * 2**16


def test_a_manifest_without_an_end_is_not_read_to_it() -> None:
    store = _Endless()
    with pytest.raises(AdapterCorrupt, match="more than 1,048,576 bytes"):
        read_manifest(store)
    assert store.sent <= LARGEST + 2**16


def test_the_bounds_are_the_workers_own() -> None:
    assert (LARGEST, LARGEST_FILE) == (limits.DOCUMENT, limits.LARGEST_OBJECT)
    (most,) = (one.max_length for one in protocol.AdapterManifest.model_fields["files"].metadata)
    assert most == MOST_FILES
    assert MOST_STEPS == bounds.MOST
    assert FILE_NAME == protocols.FILE_NAME
    assert NEEDED == (CONFIG_NAME, WEIGHTS_NAME)
    fields = protocol.AdapterManifest.model_fields
    longest = [_longest(fields[name]) for name in ("task_uid", "namespace", "name", "base_model")]
    assert longest == [LONGEST_UID, *[LONGEST_NAME] * 3]
    assert protocols.LONGEST_FILE_NAME == LONGEST_FILE_NAME


def _longest(field: FieldInfo) -> int:
    return next(one.max_length for one in field.metadata if hasattr(one, "max_length"))
