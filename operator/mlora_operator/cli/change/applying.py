"""All tasks are looked at before the first one is changed: a wrong name, or a task that cannot be changed, changes none."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from mlora_operator.cli import exit_codes
from mlora_operator.cli.change.verdicts import JSON, ChangeVerdict
from mlora_operator.cli.output import CommandError


class TaskChanger(Protocol):
    """The part of ``cluster.KubeCluster`` that is needed here."""

    namespace: str

    async def task(self, name: str) -> JSON: ...

    async def suspend(self, namespace: str, name: str, *, suspended: bool = True) -> None: ...

    async def annotate(self, namespace: str, name: str, annotation: str, value: str) -> None: ...

    async def delete(self, namespace: str, name: str, uid: str) -> None: ...


Write = Callable[[TaskChanger, JSON], Awaitable[None]]
Decided = tuple[JSON, ChangeVerdict]


async def decided(
    cluster: TaskChanger, names: Sequence[str], judge: Callable[[JSON], ChangeVerdict]
) -> list[Decided]:
    """The tasks in the order of ``names``, each once. Raises CommandError when one is not there, or is refused."""
    tasks = [await cluster.task(name) for name in dict.fromkeys(names)]
    verdicts = [judge(task) for task in tasks]
    refusals = [told(task, verdict) for task, verdict in zip(tasks, verdicts, strict=True) if verdict.refused]
    if refusals:
        raise CommandError("\n".join(refusals), exit_codes.INVALID)
    return list(zip(tasks, verdicts, strict=True))


async def apply_changes(
    cluster: TaskChanger, found: Sequence[Decided], write: Write, say: Callable[[JSON, ChangeVerdict], None]
) -> None:
    for task, verdict in found:
        if verdict.act:
            await write(cluster, task)
        say(task, verdict)


def told(task: JSON, verdict: ChangeVerdict) -> str:
    return f"loratask/{task['metadata']['name']} {verdict.words}"
