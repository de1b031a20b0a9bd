"""What a finished adapter consists of, as its ``manifest.json`` says."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from mlora_operator.download.errors import AdapterCorrupt, AdapterNotFound
from mlora_operator.download.source import AdapterSource

MANIFEST_NAME = "manifest.json"
LARGEST = 2**20  # bytes of a manifest; these are the worker's own bounds, which cannot be imported here
MOST_FILES = 1024
LARGEST_FILE = 2**50  # bytes
MOST_STEPS = 2**62
LONGEST_UID, LONGEST_NAME = 128, 253  # characters
LONGEST_FILE_NAME = 128  # characters
NEEDED = ("adapter_config.json", "adapter_model.safetensors")  # without them, there is nothing to load
# What a folder may get: no code, nothing hidden, no path of any system, no sign that a terminal or an editor obeys.
FILE_NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.-]*\.(json|jsonl|safetensors|md|jinja|txt|model)$"
_VERSION = 1
_FILE_NAME = re.compile(FILE_NAME)
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class AdapterFile:
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
    files: tuple[AdapterFile, ...]
    content: bytes = field(repr=False)

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(file.bytes for file in self.files)

    def as_json(self) -> dict[str, Any]:
        parsed: dict[str, Any] = json.loads(self.content)
        return parsed


def read_manifest(source: AdapterSource) -> Manifest:
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
            task_uid=_text(parsed, "taskUid", LONGEST_UID),
            namespace=_text(parsed, "namespace", LONGEST_NAME),
            name=_text(parsed, "name", LONGEST_NAME),
            base_model=_text(parsed, "baseModel", LONGEST_NAME),
            step=_of_type(parsed["step"], int),
            files=tuple(
                AdapterFile(
                    _of_type(one["name"], str), _of_type(one["bytes"], int), _of_type(one["sha256"], str)
                )
                for one in parsed["files"]
            ),
            content=content,
        )
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise AdapterCorrupt(f"{MANIFEST_NAME} is not an adapter's manifest: {error!r}") from error
    if not 0 <= manifest.step <= MOST_STEPS:
        raise AdapterCorrupt(f"{MANIFEST_NAME} has a step outside 0 to {MOST_STEPS:,}")
    if len(manifest.files) > MOST_FILES:
        raise AdapterCorrupt(f"{MANIFEST_NAME} names more than {MOST_FILES:,} files")
    for file in manifest.files:
        _check_file(file)
    # Two names that differ in case are one file on some machines.
    for name, times in Counter(file.name.casefold() for file in manifest.files).items():
        if times > 1:
            raise AdapterCorrupt(f"{MANIFEST_NAME} names {name} twice")
    return manifest


def check_loadable(manifest: Manifest) -> None:
    """Raises AdapterCorrupt where what every adapter has is not among the files."""
    missing = [name for name in NEEDED if all(file.name != name for file in manifest.files)]
    if missing:
        raise AdapterCorrupt(
            f"{MANIFEST_NAME} names no {' and no '.join(missing)}, so there is no adapter to load: look who wrote it, or "
            f"publish it again"
        )


def _check_file(file: AdapterFile) -> None:
    """Raises AdapterCorrupt."""
    name = file.name
    sound = len(name) <= LONGEST_FILE_NAME and _FILE_NAME.fullmatch(name)
    if not sound or name.casefold() == MANIFEST_NAME:
        raise AdapterCorrupt(
            f"{MANIFEST_NAME} names a file that no adapter has: {name[:LONGEST_FILE_NAME]!r}; nothing was downloaded. "
            f"Look who wrote this adapter, or upgrade mlora if a later version did"
        )
    if not 0 <= file.bytes <= LARGEST_FILE or not _SHA256.fullmatch(file.sha256):
        raise AdapterCorrupt(f"{MANIFEST_NAME} has no size or no SHA-256 for {name}")


def _text(parsed: dict[str, Any], field: str, most: int) -> str:
    text: str = _of_type(parsed[field], str)
    if len(text) > most:
        raise ValueError(f"{field} has more than {most} characters")
    return text


def _of_type(value: Any, type_: type[Any]) -> Any:
    if not isinstance(value, type_) or isinstance(value, bool):
        raise TypeError(f"{value!r} where a value of type {type_.__name__} was expected")
    return value
