"""What a finished adapter consists of, as its ``manifest.json`` says."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from mlora_operator.download.errors import AdapterCorrupt, AdapterNotFound
from mlora_operator.download.source import Source

MANIFEST_NAME = "manifest.json"
LARGEST = 2**20  # bytes of a manifest; these three are the worker's own bounds, which cannot be imported here
MOST_FILES = 1024
LARGEST_FILE = 2**50  # bytes
_VERSION = 1
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class ManifestFile:
    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The fields that a download needs; ``content`` is the file itself, with whatever else stands in it."""

    task_uid: str
    namespace: str
    name: str
    base_model: str
    step: int
    files: tuple[ManifestFile, ...]
    content: bytes = field(repr=False)

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(file.bytes for file in self.files)

    def as_json(self) -> dict[str, Any]:
        parsed: dict[str, Any] = json.loads(self.content)
        return parsed


def read_manifest(source: Source) -> Manifest:
    """Raises AdapterNotFound, StoreRefused, StoreSilent, AdapterCorrupt."""
    content = bytearray()
    try:
        for piece in source.read(MANIFEST_NAME):
            content += piece
            if len(content) > LARGEST:
                raise AdapterCorrupt(
                    f"{MANIFEST_NAME} has more than {LARGEST:,} bytes, which no adapter's manifest has"
                )
    except AdapterNotFound as error:
        raise AdapterNotFound(f"no finished adapter: {error}") from error
    return parse_manifest(bytes(content))


def parse_manifest(content: bytes) -> Manifest:
    """Raises AdapterCorrupt. Fields that are not known here are kept in ``content`` and otherwise ignored."""
    try:
        parsed = json.loads(content)
        if not isinstance(parsed, dict):
            raise TypeError("no object")
        if parsed.get("version", _VERSION) != _VERSION:
            message = f"{MANIFEST_NAME} has version {parsed['version']!r}; upgrade mlora to read it"
            raise AdapterCorrupt(message)
        manifest = Manifest(
            task_uid=_of_type(parsed["taskUid"], str),
            namespace=_of_type(parsed["namespace"], str),
            name=_of_type(parsed["name"], str),
            base_model=_of_type(parsed["baseModel"], str),
            step=_of_type(parsed["step"], int),
            files=tuple(
                ManifestFile(
                    _of_type(one["name"], str), _of_type(one["bytes"], int), _of_type(one["sha256"], str)
                )
                for one in parsed["files"]
            ),
            content=content,
        )
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise AdapterCorrupt(f"{MANIFEST_NAME} is not an adapter's manifest: {error!r}") from error
    if len(manifest.files) > MOST_FILES:
        raise AdapterCorrupt(f"{MANIFEST_NAME} names more than {MOST_FILES:,} files")
    for name, times in Counter(file.name for file in manifest.files).items():
        if times > 1:
            raise AdapterCorrupt(f"{MANIFEST_NAME} names {name} twice")
    for file in manifest.files:
        outside = ("", "..", ".", MANIFEST_NAME)
        if PurePosixPath(file.name).name != file.name or file.name in outside or "\0" in file.name:
            raise AdapterCorrupt(f"{MANIFEST_NAME} names a file outside of the adapter: {file.name!r}")
        if not 0 <= file.bytes <= LARGEST_FILE or not _SHA256.fullmatch(file.sha256):
            raise AdapterCorrupt(f"{MANIFEST_NAME} has no size or no SHA-256 for {file.name}")
    return manifest


def _of_type(value: Any, type_: type[Any]) -> Any:
    if not isinstance(value, type_) or isinstance(value, bool):
        raise TypeError(f"{value!r} where a value of type {type_.__name__} was expected")
    return value
