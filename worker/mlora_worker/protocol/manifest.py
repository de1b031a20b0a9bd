"""The manifest of a finished adapter, which is written last. Pure."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    Field,
)

from mlora_worker.bounds import (
    Amount,
    Digest,
    LongName,
    Name,
    Real,
    Word,
)
from mlora_worker.protocol.message import Message
from mlora_worker.protocol.report import EvaluationRecord

MANIFEST_NAME = "manifest.json"
# What a folder may get: no code, nothing hidden, no path of any system, no sign that a terminal or an editor obeys.
FILE_NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.-]*\.(json|jsonl|safetensors|md|jinja|txt|model)$"
LONGEST_FILE_NAME = 128  # characters


class ManifestFile(Message):
    name: LongName
    bytes: Amount
    sha256: Digest


def _of_an_adapter(file: ManifestFile) -> ManifestFile:
    if len(file.name) > LONGEST_FILE_NAME or not re.fullmatch(FILE_NAME, file.name):
        raise ValueError(f"no file of an adapter is named {file.name[:LONGEST_FILE_NAME]!r}")
    return file


AdapterFile = Annotated[ManifestFile, AfterValidator(_of_an_adapter)]


class AdapterManifest(Message):
    """Written after all files of an adapter; without it, there is no adapter. ``fingerprint`` identifies the task
    (uid and spec), so that a restarted worker knows its own finished work."""

    version: Literal[1] = 1
    task_uid: Word
    namespace: Name
    name: Name
    fingerprint: Word
    base_model: Name
    step: Amount
    loss: Real | None
    evaluation: EvaluationRecord | None = None  # of the published weights
    quantization: Word | None = None  # of the base that it was trained on; None: plain
    # Of the base, as its config.json says; only of adapters on routed experts, which servers keep under other names.
    base_model_type: Word | None = None
    files: Annotated[tuple[AdapterFile, ...], Field(max_length=1024)]
