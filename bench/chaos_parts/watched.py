"""The tasks of a namespace as a real API server has them, kept in this process by a watch."""

from __future__ import annotations

import threading
from typing import Any

from kubernetes import client, watch
from kubernetes.client.exceptions import ApiException

from mlora_operator.api import API_VERSION
from mlora_operator.api import task as loratask
from tests.fixtures.faulty_world import end_of
from tests.fixtures.loratask import loratask as manifest

GROUP, VERSION = API_VERSION.split("/")
_WATCH_SECONDS = 60  # after which a watch begins anew, whatever happened to its connection
_PAUSE = 1.0


class Mirror:
    """What a watch has told. Thread-safe. ``broken`` says which tasks went back from their end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[str, dict[str, Any]] = {}
        self._forgotten: set[str] = set()  # uids
        self.broken: list[str] = []

    def see(self, kind: str, raw: dict[str, Any]) -> None:
        """Take in an event of the watch."""
        name, uid = raw["metadata"]["name"], raw["metadata"]["uid"]
        with self._lock:
            if kind == "DELETED":
                self._found.pop(name, None)
            elif uid not in self._forgotten:
                before = end_of(self._found.get(name, {}).get("status", {}))
                if before is not None and end_of(raw.get("status", {})) != before:
                    self.broken.append(f"{name} went back from {before}")
                self._found[name] = raw

    def add(self, raw: dict[str, Any]) -> None:
        """One that was just made, unless the watch has told of it already."""
        with self._lock:
            self._found.setdefault(raw["metadata"]["name"], raw)

    def forget(self, name: str) -> None:
        """One that is about to be deleted: a late word of it brings it not back."""
        with self._lock:
            raw = self._found.pop(name, None)
            if raw is not None:
                self._forgotten.add(raw["metadata"]["uid"])

    def all(self) -> list[dict[str, Any]]:
        with self._lock:
            return list(self._found.values())


class WatchedTasks:
    """All tasks of one namespace; nobody else deletes any."""

    def __init__(self, api: client.ApiClient, namespace: str) -> None:
        self._api = client.CustomObjectsApi(api)
        self._of = (GROUP, VERSION, namespace, loratask.PLURAL)
        self._stop = threading.Event()
        self.mirror = Mirror()
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    def create(self, name: str, spec: dict[str, Any]) -> str:
        """The new task's uid."""
        made = self._api.create_namespaced_custom_object(*self._of, manifest(name, spec))
        self.mirror.add(made)
        return str(made["metadata"]["uid"])

    def delete(self, name: str) -> None:
        """Nothing happens when it is gone."""
        self.mirror.forget(name)
        try:
            self._api.delete_namespaced_custom_object(*self._of, name)
        except ApiException as error:
            if error.status != 404:
                raise

    def close(self) -> None:
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                listed = self._api.list_namespaced_custom_object(*self._of)
                for raw in listed["items"]:
                    self.mirror.see("ADDED", raw)
                version = listed["metadata"]["resourceVersion"]
                stream = watch.Watch().stream(
                    self._api.list_namespaced_custom_object,
                    *self._of,
                    resource_version=version,
                    timeout_seconds=_WATCH_SECONDS,
                )
                for event in stream:
                    self.mirror.see(event["type"], event["object"])
            except Exception:  # cut off, or the version is too old: begin anew
                self._stop.wait(_PAUSE)
