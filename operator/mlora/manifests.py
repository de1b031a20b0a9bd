"""Specs of Python as manifests, so that they go the way that files go: the same checks, the same messages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mlora_operator.api import API_VERSION, task
from mlora_operator.api.task import LoRATaskSpec
from mlora_operator.cli import exit_codes
from mlora_operator.cli.output import CommandError


def task_text(
    name: str, spec: LoRATaskSpec | Mapping[str, Any], labels: Mapping[str, str] | None
) -> tuple[str, str]:
    """A manifest by the name that messages call it, and its content. What the spec leaves out stays left out."""
    if isinstance(spec, LoRATaskSpec):
        spec = spec.model_dump(mode="json", by_alias=True, exclude_unset=True)
    metadata: dict[str, Any] = {"name": name} | ({"labels": dict(labels)} if labels else {})
    return _text(name, {"apiVersion": API_VERSION, "kind": task.KIND, "metadata": metadata, "spec": spec})


def secret_text(name: str, values: Mapping[str, str]) -> tuple[str, str]:
    manifest = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name},
        "stringData": dict(values),
    }
    return _text(f"secret {name}", manifest)


def _text(name: str, manifest: Mapping[str, Any]) -> tuple[str, str]:
    try:
        return str(name), json.dumps(manifest, indent=1, allow_nan=False)  # JSON is YAML
    except (TypeError, ValueError, RecursionError) as error:
        raise CommandError(f"{name}: the spec must be plain data: {error}", exit_codes.INVALID) from error
