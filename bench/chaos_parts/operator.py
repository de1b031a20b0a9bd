"""The operator's process: the real reconcile loop and the real HTTP links, before a stand-in for the API server."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Mapping
from multiprocessing.connection import Client, Connection
from typing import Any

from mlora_operator.api import pipeline as lorapipeline
from mlora_operator.api import task as loratask
from mlora_operator.coordinator import Links
from mlora_operator.reconcile.loop import Loop, utc_now
from mlora_operator.reconcile.ports import ClusterObjects, Gone
from mlora_operator.reconcile.state.decision import DesiredWorkers, Event, Manifest
from mlora_operator.reconcile.state.snapshot import Key, Pipeline, Pod, SecretData, Task
from mlora_operator.settings import Settings, WorkerDefaults

SOCKET = "CHAOS_CONTROL"

logger = logging.getLogger("mlora_operator.chaos")


class RemoteCluster:
    """``reconcile.ports.Cluster`` over the socket at ``path``. Calls take about a millisecond and block the loop."""

    def __init__(self, path: str) -> None:
        self._connection: Connection = Client(path, "AF_UNIX")

    def _call(self, name: str, *arguments: object) -> Any:
        self._connection.send((name, arguments))
        kind, value = self._connection.recv()
        if kind == "gone":
            raise Gone(value)
        if kind == "error":
            raise RuntimeError(value)
        return value

    def objects(self) -> ClusterObjects:
        found = self._call("objects")
        assert isinstance(found, ClusterObjects)
        return found

    def revision(self, _pipeline: Pipeline) -> str:
        return "1"

    def coordinator_url(self, _pipeline: Pipeline, _scheme: str) -> str:
        return str(self._call("url"))

    async def read_secret(self, key: Key) -> SecretData | None:
        found: SecretData | None = self._call("secret", key)
        return found

    async def read_config_map(self, key: Key) -> Mapping[str, str] | None:
        raise AssertionError(f"no task here has its rows in a ConfigMap such as {key}")

    async def read_token(self, _pipeline: Pipeline) -> str | None:
        return str(self._call("token"))

    async def read_trust(self, _pipeline: Pipeline) -> None:
        """Nothing is encrypted here."""

    async def read_namespace_labels(self, namespace: str) -> Mapping[str, str]:
        return {"kubernetes.io/metadata.name": namespace}

    async def apply_pipeline(self, _manifest: Manifest) -> None:
        raise AssertionError("there is no catalogue here")

    async def delete_pipeline(self, _pipeline: Pipeline) -> None:
        raise AssertionError("no pipeline here has replicas")

    async def apply_workers(self, workers: DesiredWorkers) -> None:
        self._call("resize", workers.replicas)

    async def delete_pod(self, pod: Pod) -> None:
        logger.info("pod %s is deleted", pod.uid)
        self._call("delete", pod.uid)

    async def delete_task(self, _task: Task) -> None:
        raise AssertionError("no task here has a time to live")

    async def patch_task_status(self, task: Task, patch: Manifest) -> None:
        self._call("patch", loratask.KIND, task.key, task.uid, task.version, patch)

    async def patch_pipeline_status(self, pipeline: Pipeline, patch: Manifest) -> None:
        self._call("patch", lorapipeline.KIND, pipeline.key, pipeline.uid, pipeline.version, patch)

    async def emit_event(self, event: Event) -> None:
        logger.info("%s %s: %s: %s", event.kind, event.about, event.reason, event.message)


def main() -> None:
    """Until it is killed."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    asyncio.run(_run(os.environ[SOCKET]))


async def _run(path: str) -> None:
    settings = Settings(namespace="chaos", worker=WorkerDefaults(image="local"), allow_private_endpoints=True)
    here = asyncio.get_running_loop()
    loop: Loop | None = None

    def wake() -> None:
        if loop is not None:
            loop.wake()

    async with Links(wake, utc_now) as links:
        loop = Loop(RemoteCluster(path), links, settings)
        threading.Thread(target=_watch, args=(path, here, wake), name="watch", daemon=True).start()
        await loop.run()


def _watch(path: str, here: asyncio.AbstractEventLoop, wake: Any) -> None:
    """Wakes the loop whenever something has changed."""
    version = 0
    connection = Client(path, "AF_UNIX")
    while True:
        connection.send(("watch", (version,)))
        _, now = connection.recv()
        if now != version:
            version = now
            here.call_soon_threadsafe(wake)
