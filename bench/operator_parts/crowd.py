"""Tasks that users apply at a steady rate, and what a watch shows of them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from bench.operator_parts.server import PAUSE, Server
from mlora_operator.api import API_VERSION
from mlora_operator.api.task import KIND, PLURAL

AT_ONCE = 32  # requests under way
SECRET = "s3-credentials"


@dataclass
class Seen:
    """Moments of one task, in seconds of ``time.monotonic``."""

    sent: float
    made: float | None = None  # the API server has it
    told: float | None = None  # its first status
    ended: float | None = None
    states: list[str] = field(default_factory=list)  # as they followed each other


class Crowd:
    """Of one namespace. ``watch`` has to run for anything to be seen."""

    def __init__(self, server: Server, namespace: str, models: tuple[str, ...]) -> None:
        self._server = server
        self._path = f"/apis/{API_VERSION}/namespaces/{namespace}/{PLURAL}"
        self._models = models
        self._news = asyncio.Event()
        self.tasks: dict[str, Seen] = {}
        self.changes: Counter[str] = Counter()  # versions of each task that the watch showed after the first

    async def watch(self) -> None:
        version: str | None = None
        while True:  # a server may end a watch at any time, such as one that is read too slowly
            if (
                version is None
            ):  # at the begin, and when it no longer knows the version, as after a CRD has changed
                try:
                    listed = await self._server.get(self._path)
                except (RuntimeError, TimeoutError, aiohttp.ClientError):
                    await asyncio.sleep(PAUSE)
                    continue
                version = listed["metadata"]["resourceVersion"]
                for one in listed["items"]:
                    self._see(one)
            async for event in self._server.watch(self._path, version):
                if event["type"] == "ERROR":
                    version = None
                    break
                version = event["object"]["metadata"]["resourceVersion"]
                if event["type"] == "MODIFIED":
                    self._see(event["object"])

    def _see(self, task: Mapping[str, Any]) -> None:
        self._look(task)
        self._news.set()

    def _look(self, task: Mapping[str, Any]) -> None:
        name, status, now = task["metadata"]["name"], task.get("status", {}), time.monotonic()
        seen = self.tasks.get(name)
        if seen is None or "state" not in status:
            return
        self.changes[name] += 1
        seen.told = seen.told or now
        if not seen.states or seen.states[-1] != status["state"]:
            seen.states.append(status["state"])
        if status["state"] in ("Succeeded", "Failed"):
            seen.ended = seen.ended or now

    async def apply(self, count: int, rate: float, prefix: str) -> None:
        """``count`` tasks, ``rate`` a second, whether or not the ones before are done."""
        slots = asyncio.Semaphore(AT_ONCE)
        begun = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for number in range(count):
                await asyncio.sleep(begun + number / rate - time.monotonic())
                group.create_task(self._apply(f"{prefix}-{number}", number, slots))

    async def _apply(self, name: str, number: int, slots: asyncio.Semaphore) -> None:
        async with slots:
            seen = self.tasks[name] = Seen(time.monotonic())
            await self._server.create(self._path, manifest(name, self._models[number % len(self._models)]))
            seen.made = time.monotonic()

    async def until(self, holds: Callable[[Seen], bool], seconds: float) -> bool:
        """Whether ``holds`` came to be true of all tasks in time."""
        try:
            async with asyncio.timeout(seconds):
                while not all(holds(seen) for seen in self.tasks.values()):
                    self._news.clear()
                    await self._news.wait()
                    await asyncio.sleep(0.05)
        except TimeoutError:
            return False
        return True


def manifest(name: str, model: str) -> dict[str, Any]:
    """A task as users write it."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": name},
        "spec": {
            "baseModel": model,
            "lora": {"rank": 16, "alpha": 32, "dropout": 0.05, "targetModules": ["q_proj", "v_proj"]},
            "dataset": {
                "uri": f"s3://datasets/{name}/train.jsonl",
                "format": "promptCompletion",
                "fields": {"prompt": "question", "completion": "answer"},
            },
            "training": {
                "batchSize": 8,
                "maxSteps": 20,
                "learningRate": 0.0002,
                "schedule": "cosine",
                "maxSeqLength": 512,
                "checkpointEverySteps": 50,
            },
            "output": {"uri": f"s3://adapters/{name}"},
            "storage": {"endpoint": "http://s3.storage:8333", "secretRef": {"name": SECRET}},
        },
    }
