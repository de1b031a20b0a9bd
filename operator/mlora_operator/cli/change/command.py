"""``mlora suspend``, ``resume``, ``retry``, ``delete``: options, the question before a deletion, and what is said."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.text import Text

from mlora_operator.cli import exit_codes
from mlora_operator.cli.change.applying import Decided, TaskChanger, Write, apply_changes, decided, told
from mlora_operator.cli.change.verdicts import (
    JSON,
    ChangeVerdict,
    deleting,
    resuming,
    retrying,
    stays,
    suspending,
)
from mlora_operator.cli.kube.choice import ClusterChoice
from mlora_operator.cli.options import (
    ContextOption,
    KubeconfigOption,
    NamesArgument,
    NamespaceOption,
    OutputOption,
)
from mlora_operator.cli.output import CommandError, OutputFormat, print_json, stderr, stdout
from mlora_operator.manifests.names import RETRY
from mlora_worker.lines import one_line

Asked = Callable[[Sequence[Decided]], None]


def suspend(
    names: NamesArgument,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
    output: OutputOption = OutputFormat.TEXT,
) -> None:
    """Take tasks out of their pipeline after a checkpoint, until they are resumed."""

    def write(cluster: TaskChanger, task: JSON) -> Awaitable[None]:
        return cluster.suspend(*_key(task))

    _change(names, ClusterChoice(namespace, context, kubeconfig), suspending, write, output)


def resume(
    names: NamesArgument,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
    output: OutputOption = OutputFormat.TEXT,
) -> None:
    """Let suspended tasks train again, from their newest checkpoints."""

    def write(cluster: TaskChanger, task: JSON) -> Awaitable[None]:
        return cluster.suspend(*_key(task), suspended=False)

    _change(names, ClusterChoice(namespace, context, kubeconfig), resuming, write, output)


def retry(
    names: NamesArgument,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
    output: OutputOption = OutputFormat.TEXT,
) -> None:
    """Run failed tasks again, from their newest checkpoints: correct first what made them fail."""
    value = datetime.now(UTC).isoformat(timespec="milliseconds")

    def write(cluster: TaskChanger, task: JSON) -> Awaitable[None]:
        return cluster.annotate(*_key(task), RETRY, value)

    _change(names, ClusterChoice(namespace, context, kubeconfig), retrying, write, output)


def delete(
    names: NamesArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
    output: OutputOption = OutputFormat.TEXT,
) -> None:
    """Delete tasks. What they have written to the store stays.

    A terminal is asked first; without one, --yes is required.
    """
    if not yes and not is_terminal():
        raise CommandError("nothing can be asked here: give --yes to delete", exit_codes.INVALID)

    def write(cluster: TaskChanger, task: JSON) -> Awaitable[None]:
        return cluster.delete(*_key(task), task["metadata"]["uid"])

    choice = ClusterChoice(namespace, context, kubeconfig)
    _change(names, choice, deleting, write, output, None if yes else _ask)


def is_terminal() -> bool:
    return sys.stdin.isatty()


def _ask(found: Sequence[Decided]) -> None:
    """Raises CommandError unless the answer is yes."""
    for task, _ in found:
        namespace, name = _key(task)
        stderr().print(Text(one_line(f"loratask/{name} in namespace {namespace}: {stays(task)}")))
    try:
        sure = typer.confirm(f"Delete {len(found)} task{'s' * (len(found) != 1)}?", err=True)
    except typer.Abort:
        sure = False
    if not sure:
        raise CommandError("nothing was deleted", exit_codes.INTERRUPTED)


def _change(
    names: Sequence[str],
    choice: ClusterChoice,
    judge: Callable[[JSON], ChangeVerdict],
    write: Write,
    output: OutputFormat,
    ask: Asked | None = None,
) -> None:
    def say(task: JSON, verdict: ChangeVerdict) -> None:
        if output is OutputFormat.JSON:
            namespace, name = _key(task)
            print_json(
                {"namespace": namespace, "name": name, "changed": verdict.act, "message": verdict.words}
            )
        else:
            (stdout() if verdict.act else stderr()).print(Text(one_line(told(task, verdict))))

    async def run() -> None:
        from mlora_operator.cli.kube.cluster import connect

        async with connect(choice) as cluster:
            found = await decided(cluster, names, judge)
            if ask is not None:
                ask(found)
            await apply_changes(cluster, found, write, say)

    asyncio.run(run())


def _key(task: JSON) -> tuple[str, str]:
    return task["metadata"]["namespace"], task["metadata"]["name"]
