"""The losses beside a finished adapter, verified by its manifest; its weights are left where they are."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from mlora_operator.download import AdapterCorrupt, AdapterNotFound, AdapterSource, Manifest
from mlora_operator.reporting.curves import Finished, Run, points_of

_HISTORY = "history.jsonl"
_CONFIG = "adapter_config.json"
_SETTINGS = (
    "peft_type",
    "r",
    "lora_alpha",
    "lora_dropout",
    "use_rslora",
    "use_dora",
    "target_modules",
    "target_parameters",
)


def finished_run(source: AdapterSource, manifest: Manifest) -> Finished:
    """Raises DownloadError: AdapterNotFound where no losses were published, AdapterCorrupt for other bytes than the
    manifest's."""
    run = Run(manifest.task_uid, manifest.namespace, manifest.name, manifest.base_model)
    try:
        points = points_of(_verified(source, manifest, _HISTORY))
        settings = _settings(json.loads(_verified(source, manifest, _CONFIG)))
    except ValueError as error:
        raise AdapterCorrupt(f"the adapter of {run.title} cannot be read: {error}") from error
    return Finished(run, points, {"base_model": run.base_model, "steps": manifest.step, **settings})


def history_rows(source: AdapterSource, manifest: Manifest) -> list[dict[str, Any]]:
    """The lines of the history as they stand there. Raises as ``finished_run`` does."""
    content = _verified(source, manifest, _HISTORY)
    try:
        points_of(content)
        return [json.loads(line) for line in content.decode().splitlines()]
    except ValueError as error:
        whose = f"{manifest.namespace}/{manifest.name}"
        raise AdapterCorrupt(f"the adapter of {whose} cannot be read: {error}") from error


def _verified(source: AdapterSource, manifest: Manifest, name: str) -> bytes:
    listed = next((file for file in manifest.files if file.name == name), None)
    if listed is None:
        raise AdapterNotFound(f"the adapter of {manifest.namespace}/{manifest.name} has no {name}")
    content = bytearray()
    for piece in source.read(name):
        content += piece
        if len(content) > listed.bytes:
            break
    if hashlib.sha256(content).hexdigest() != listed.sha256:
        raise AdapterCorrupt(f"{name} does not match the SHA-256 in its manifest")
    return bytes(content)


def _settings(config: Mapping[str, Any]) -> dict[str, str | int | float]:
    found: dict[str, str | int | float] = {}
    for name in _SETTINGS:
        value = config.get(name)
        if isinstance(value, str | int | float):
            found[name] = value
        elif isinstance(value, list):
            found[name] = ", ".join(map(str, value))
    return found
