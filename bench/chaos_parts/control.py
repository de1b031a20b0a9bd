"""API server and kubelet over a local socket: what the operator, in a process of its own, sees and changes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any, Protocol

from bench.chaos_parts.api import ApiServer
from mlora_operator.api import pipeline as lorapipeline
from mlora_operator.api import task as loratask
from mlora_operator.reconcile.ports import ClusterObjects, Gone
from mlora_operator.reconcile.state.snapshot import Key, WorkerGroup

_WATCH_SECONDS = 2.0  # after which a watch that has nothing to say says so


class Workers(Protocol):
    """What is asked of the kubelet's part."""

    token: str
    url: str

    def group(self) -> WorkerGroup | None: ...
    def resize(self, replicas: int) -> None: ...
    def delete(self, uid: str) -> None: ...


class Control:
    """Answers ``(name, arguments)`` with ``(kind, value)``: "ok", "gone" or "error"."""

    def __init__(self, path: Path, api: ApiServer, kubelet: Workers, pipeline: Key) -> None:
        self._api, self._kubelet, self._pipeline = api, kubelet, pipeline
        self.looks = 0  # how often an operator has looked at all objects
        self._calls: dict[str, Callable[..., Any]] = {
            "objects": self._objects,
            "secret": api.secret,
            "token": lambda: kubelet.token,
            "url": lambda: kubelet.url,
            "resize": kubelet.resize,
            "delete": kubelet.delete,
            "patch": api.patch_status,
            "watch": lambda after: api.wait(after, _WATCH_SECONDS),
        }
        self._listener = Listener(str(path), "AF_UNIX", backlog=16)
        threading.Thread(target=self._accept, name="control", daemon=True).start()

    def _objects(self) -> ClusterObjects:
        self.looks += 1
        group = self._kubelet.group()
        return ClusterObjects(
            self._api.of_kind(loratask.KIND),
            self._api.of_kind(lorapipeline.KIND),
            {self._pipeline: group} if group is not None else {},
        )

    def close(self) -> None:
        """No further operator comes in."""
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        try:
            while True:
                name, arguments = connection.recv()
                try:
                    answer = ("ok", self._calls[name](*arguments))
                except Gone as error:
                    answer = ("gone", str(error))
                except Exception as error:
                    answer = ("error", f"{type(error).__name__}: {error}")
                connection.send(answer)
        except (EOFError, OSError):  # that operator is gone
            connection.close()
