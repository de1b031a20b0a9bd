"""Files for the API server: tasks and pipelines in memory, each mirrored in a YAML file when it changes."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from mlora_operator.api import pipeline, task
from mlora_operator.api.meta import timestamp
from mlora_operator.api.task import LoRATaskSpec
from mlora_operator.local.writing import writing
from mlora_operator.reconcile.ports import Gone
from mlora_operator.reconcile.state.snapshot import Key

_PLURALS = {task.KIND: task.PLURAL, pipeline.KIND: pipeline.PLURAL}


class LocalObjects:
    """Objects by kind and key; ``FOLDER/loratasks/NAMESPACE.NAME.yaml`` is what ``kubectl get -o yaml`` shows.

    Not a store to share: one process writes, anyone may read.
    """

    def __init__(self, folder: Path, now: Callable[[], datetime]) -> None:
        self._folder = folder
        self._now = now
        self._objects: dict[tuple[str, Key], dict[str, Any]] = {}
        self._version = 0

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [one for (of, _), one in self._objects.items() if of == kind]

    def apply(self, manifest: Mapping[str, Any]) -> None:
        """Make the object, or give it this spec."""
        meta = manifest["metadata"]
        known = self._objects.get((manifest["kind"], Key(meta["namespace"], meta["name"])))
        if known is not None and known["spec"] == manifest["spec"]:
            return
        kept = known["metadata"] if known is not None else {}
        metadata = {
            "uid": str(uuid.uuid4()),
            "creationTimestamp": timestamp(self._now()),
            **kept,
            **meta,
            "generation": kept.get("generation", 0) + 1,
        }
        status = {"status": known["status"]} if known is not None and "status" in known else {}
        self._store({**manifest, "metadata": metadata, **status})

    def resume(self, manifest: Mapping[str, Any]) -> bool:
        """Take a task over from a former run's file when it succeeded there with the same spec."""
        former = self._read(manifest)
        if former is None or _work(former.get("spec")) != _work(manifest["spec"]):
            return False
        held = former.get("status", {}).get("conditions", [])
        if not any(one["type"] == "Succeeded" and one["status"] == "True" for one in held):
            return False
        self._store(former)
        return True

    def patch_status(self, kind: str, key: Key, uid: str, patch: Mapping[str, Any]) -> dict[str, Any]:
        """JSON merge patch of the status; the whole object after it. Raises Gone."""
        known = self._objects.get((kind, key))
        if known is None or known["metadata"]["uid"] != uid:
            raise Gone(f"{kind} {key}")
        self._store({**known, "status": merged(known.get("status", {}), patch)})
        return self._objects[kind, key]

    def _store(self, content: dict[str, Any]) -> None:
        self._version += 1
        meta = {**content["metadata"], "resourceVersion": str(self._version)}
        content = {**content, "metadata": meta}
        self._objects[content["kind"], Key(meta["namespace"], meta["name"])] = content
        path = self._path(content)
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".tmp")
        with writing(draft):
            draft.write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True), encoding="utf-8")
        draft.replace(path)  # a reader never sees half a file

    def _read(self, manifest: Mapping[str, Any]) -> dict[str, Any] | None:
        try:
            content = yaml.safe_load(self._path(manifest).read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError):
            return None
        return content if isinstance(content, dict) else None

    def _path(self, content: Mapping[str, Any]) -> Path:
        meta = content["metadata"]
        return self._folder / _PLURALS[content["kind"]] / f"{meta['namespace']}.{meta['name']}.yaml"


def _work(spec: Any) -> Any:
    """What a spec asks for, without what may change while it is done: a field that a former version did not write stands at
    its default, and what may be replaced is no part of the work."""
    try:
        filled = LoRATaskSpec.model_validate(spec, extra="ignore").model_dump(mode="json", by_alias=True)
    except ValidationError:
        return spec
    del filled["output"]["overwrite"]
    return filled


def merged(before: Any, patch: Any) -> Any:
    """RFC 7386, JSON merge patch: null removes, objects are merged, everything else replaces."""
    if not isinstance(patch, Mapping):
        return patch
    after = dict(before) if isinstance(before, Mapping) else {}
    for key, value in patch.items():
        if value is None:
            after.pop(key, None)
        else:
            after[key] = merged(after.get(key), value)
    return after
