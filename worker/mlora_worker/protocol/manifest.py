"""The manifest of a finished adapter, which is written last. Pure."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    Field,
)

from mlora_worker.bounds import (
    Amount,
    LongName,
    Name,
    Real,
    Word,
)
from mlora_worker.protocol.message import Message
from mlora_worker.protocol.report import EvaluationRecord

MANIFEST_NAME = "manifest.json"


class ManifestFile(Message):
    name: LongName
    bytes: Amount
    sha256: Word


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
    files: Annotated[tuple[ManifestFile, ...], Field(max_length=1024)]
