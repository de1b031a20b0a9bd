"""The tasks of a namespace as they change, whatever becomes of the connection meanwhile."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Protocol

from mlora_operator.cli.kube.client import JSON, KubeError
from mlora_operator.cli.kube.cluster import NO_ANSWER
from mlora_operator.cli.kube.retry import Clock, RetryTimeouts, Sleep, longer, may_pass


class TaskSource(Protocol):
    """The part of ``cluster.Cluster`` that is needed here."""

    async def renew(self) -> None: ...

    async def tasks(self, namespace: str | None, name: str | None = None) -> tuple[list[JSON], str]: ...

    def task_events(
        self, namespace: str | None, version: str, name: str | None = None
    ) -> AsyncIterator[JSON]: ...


async def follow(
    source: TaskSource,
    namespace: str | None,
    name: str | None,
    patience: RetryTimeouts,
    now: Clock,
    sleep: Sleep,
) -> AsyncGenerator[dict[str, JSON], None]:
    """All tasks of ``namespace`` by name (or the one called ``name``) after each change; of all namespaces, where it is
    None, by namespace/name. Never ends by itself.

    1. Tasks are listed, then watched from the list's version on. A watch that ends is opened again where it ended.
    2. After a refusal, such as that the version is too old (410 Gone), they are listed anew.
    3. When there is no answer, or one that may pass (5xx, 429), it is tried again with growing pauses until
       ``patience`` runs out; then the error is raised.
    4. After the first good answer each refusal may pass, too: an API server that starts does not know its
       resources (404) nor who may what (403) for some seconds. For a 401 the kubeconfig is read again.
    """

    def called(task: JSON) -> str:
        meta = task["metadata"]
        return str(meta["name"]) if namespace is not None else f"{meta['namespace']}/{meta['name']}"

    known: dict[str, JSON] = {}
    version: str | None = None
    answered = False
    last_answer = now()
    pause = 0.0
    while True:
        try:
            if version is None:
                items, version = await source.tasks(namespace, name)
                known = {called(one): one for one in items}
                answered, last_answer = True, now()
                yield dict(known)
            opened = now()
            async for event in source.task_events(namespace, version, name):
                changed = event["object"]
                version = changed["metadata"]["resourceVersion"]
                last_answer, pause = now(), 0.0
                if event["type"] == "BOOKMARK":
                    continue
                if event["type"] == "DELETED":
                    known.pop(called(changed), None)
                else:
                    known[called(changed)] = changed
                yield dict(known)
            last_answer = now()
            if last_answer - opened > 1:
                pause = 0.0
                continue
        except (KubeError, *NO_ANSWER) as error:
            waited = now() - last_answer
            if waited > (patience.later if answered else patience.first):
                if isinstance(error, TimeoutError):  # the caller's own timeouts look like this
                    raise ConnectionError(f"no answer for {waited:.0f} seconds") from error
                raise
            if not answered and not may_pass(error):
                raise
            if isinstance(error, KubeError):
                version = None
                if error.status == 401:
                    await source.renew()
        # Also after a watch that ended as soon as it was opened: whatever does that would do it again.
        pause = longer(pause)
        await sleep(pause)
