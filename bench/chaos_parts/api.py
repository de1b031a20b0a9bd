"""The API server's part of the world: objects with uids and versions, statuses that are merged, and a watch."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from mlora_operator.api import API_VERSION
from mlora_operator.api.meta import timestamp
from mlora_operator.local.objects import merged
from mlora_operator.reconcile.ports import Gone
from mlora_operator.reconcile.state.snapshot import Key
from tests.fixtures.faulty_world import end_of


class Conflict(Exception):
    """The object was written since the writer saw it."""


class ApiServer:
    """Thread-safe. ``changed`` is notified with every change; ``version`` counts them."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.version = 0
        self.broken: list[str] = []  # what must never happen, and did
        self._objects: dict[tuple[str, Key], dict[str, Any]] = {}
        self._secrets: dict[Key, dict[str, str]] = {}

    def create(self, kind: str, key: Key, spec: Mapping[str, Any]) -> str:
        """The new object's uid."""
        with self.changed:
            uid = str(uuid.uuid4())
            meta = {
                "namespace": key.namespace,
                "name": key.name,
                "uid": uid,
                "creationTimestamp": timestamp(datetime.now(UTC)),
                "generation": 1,
            }
            self._store(
                {"apiVersion": API_VERSION, "kind": kind, "metadata": meta, "spec": dict(spec), "status": {}}
            )
            return uid

    def delete(self, kind: str, key: Key) -> None:
        with self.changed:
            if self._objects.pop((kind, key), None) is not None:
                self.note()

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        with self.changed:
            return [raw for (of, _), raw in self._objects.items() if of == kind]

    def patch_status(self, kind: str, key: Key, uid: str, seen: str, patch: Mapping[str, Any]) -> None:
        """Raises Gone, or Conflict when someone wrote since version ``seen``."""
        with self.changed:
            raw = self._objects.get((kind, key))
            if raw is None or raw["metadata"]["uid"] != uid:
                raise Gone(f"{kind} {key}")
            if raw["metadata"]["resourceVersion"] != seen:
                raise Conflict(f"{kind} {key} has been modified")
            after = merged(raw["status"], patch)
            before = end_of(raw["status"])
            if before is not None and end_of(after) != before:
                self.broken.append(f"{key} went back from {before}")
            self._store({**raw, "status": after})

    def put_secret(self, key: Key, data: Mapping[str, str]) -> None:
        with self.changed:
            self._secrets[key] = dict(data)
            self.note()

    def secret(self, key: Key) -> dict[str, str] | None:
        with self.changed:
            return self._secrets.get(key)

    def wait(self, after: int, seconds: float) -> int:
        """The version, once it is above ``after`` or the time is over."""
        with self.changed:
            self.changed.wait_for(lambda: self.version > after, seconds)
            return self.version

    def note(self) -> None:
        """Something has changed."""
        with self.changed:
            self.version += 1
            self.changed.notify_all()

    def _store(self, raw: dict[str, Any]) -> None:
        self.note()
        meta = {**raw["metadata"], "resourceVersion": str(self.version)}
        # A new object each time: who holds the former keeps it.
        self._objects[raw["kind"], Key(meta["namespace"], meta["name"])] = {**raw, "metadata": meta}
