"""Tasks of a cluster, by the modules behind ``mlora submit``, ``logs``, ``fetch`` and ``delete``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

from mlora.backend import JSON, Seen
from mlora.background import run_to_end
from mlora_operator.api import task as loratask
from mlora_operator.cli import exit_codes
from mlora_operator.cli.change.applying import TaskChanger, apply_changes, decided
from mlora_operator.cli.change.verdicts import deleting
from mlora_operator.cli.fetch.adapter_of_task import find_adapter
from mlora_operator.cli.kube.choice import ClusterChoice
from mlora_operator.cli.kube.cluster import KubeCluster, connect
from mlora_operator.cli.kube.retry import RetryTimeouts
from mlora_operator.cli.logs.story import Story, StoryLine
from mlora_operator.cli.output import CommandError
from mlora_operator.cli.submit.applying import ApplyContext, Submitted, apply_submission
from mlora_operator.cli.submit.awaiting import Waiting, wait_for
from mlora_operator.cli.submit.conflict import Step
from mlora_operator.cli.submit.manifests import read_submission
from mlora_operator.cli.submit.outcomes import TaskResult, exit_code
from mlora_operator.cli.task_table import row
from mlora_operator.download import Access

_REFUSED_AFTER = 60.0  # seconds for which the operator may reject a task; the cause may go
T = TypeVar("T")


@dataclass(frozen=True)
class ClusterBackend:
    """``endpoint`` instead of a task's, where that one cannot be reached from here."""

    choice: ClusterChoice
    endpoint: str | None = None

    def submit(self, texts: Sequence[tuple[str, str]], *, replace: bool) -> list[str]:
        submission = read_submission(texts, self.choice.namespace, None)

        async def apply(cluster: KubeCluster) -> list[str]:
            tools = ApplyContext(cluster, False, RetryTimeouts(), time.monotonic, asyncio.sleep)
            done = await apply_submission(tools, submission, replace=replace, say=lambda _: None)
            return [one.name for one in done]

        return self._with(apply)

    def wait(self, names: Sequence[str], seconds: float | None, seen: Seen) -> None:
        async def wait(cluster: KubeCluster) -> None:
            there = [await cluster.task(name) for name in names]
            waiting = Waiting([_submitted(one) for one in there], _REFUSED_AFTER)
            try:
                async with asyncio.timeout(seconds):
                    await wait_for(cluster, waiting, RetryTimeouts(), seen, time.monotonic)
            except TimeoutError:
                still = ", ".join(name for _, name in waiting.open)
                message = f"not all tasks finished within {seconds:g} seconds; still in the cluster: {still}"
                raise CommandError(message, exit_codes.TIMEOUT) from None
            wrong = [
                _wrong(name, result, waiting.tasks[namespace, name])
                for (namespace, name), result in waiting.outcomes.items()
                if result is not TaskResult.SUCCEEDED
            ]
            if wrong:
                raise CommandError("\n".join(wrong), exit_code(waiting.outcomes.values()))

        self._with(wait)

    def tasks(self, labels: str | None) -> list[JSON]:
        return list(self._with(lambda cluster: cluster.objects(loratask.PLURAL, cluster.namespace, labels)))

    def task(self, name: str) -> JSON:
        return self._with(lambda cluster: cluster.task(name))

    def story(self, name: str) -> list[StoryLine]:
        async def tell(cluster: KubeCluster) -> list[StoryLine]:
            found = await cluster.task(name)
            events = await cluster.events_about(cluster.namespace, found["metadata"]["uid"])
            return list(Story(0).news(found, events, datetime.now(UTC)))

        return self._with(tell)

    def adapter(self, name: str) -> tuple[str, Access, str]:
        return run_to_end(lambda: find_adapter(name, self.choice, self.endpoint))

    def delete(self, names: Sequence[str]) -> None:
        def write(cluster: TaskChanger, task: JSON) -> Awaitable[None]:
            meta = task["metadata"]
            return cluster.delete(meta["namespace"], meta["name"], meta["uid"])

        async def change(cluster: KubeCluster) -> None:
            found = await decided(cluster, names, deleting)
            await apply_changes(cluster, found, write, lambda *_: None)

        self._with(change)

    def _with(self, call: Callable[[KubeCluster], Coroutine[Any, Any, T]]) -> T:
        async def connected() -> T:
            async with connect(self.choice) as cluster:
                return await call(cluster)
            raise AssertionError("connect() keeps no error to itself")

        return run_to_end(connected)


def _submitted(task: dict[str, Any]) -> Submitted:
    meta = task["metadata"]
    return Submitted(meta["namespace"], meta["name"], meta["uid"], Step.KEEP, task)


def _wrong(name: str, result: TaskResult, task: JSON) -> str:
    if result is TaskResult.GONE:
        return f"loratask/{name} was deleted"
    shown = row(task)
    return f"loratask/{name} {result.value.lower()}: {shown.reason}: {shown.message}"
