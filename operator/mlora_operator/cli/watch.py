"""``mlora watch``: tasks as they go, until all have finished."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from contextlib import aclosing
from typing import Annotated, Any, Protocol

import typer
from rich.console import RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from mlora_operator.cli import exit_codes
from mlora_operator.cli.kube.choice import ClusterChoice
from mlora_operator.cli.options import (
    AllNamespacesOption,
    ContextOption,
    KubeconfigOption,
    NamespaceOption,
    OutputOption,
    TimeoutOption,
)
from mlora_operator.cli.output import CommandError, OutputFormat, print_json, stderr, stdout
from mlora_operator.cli.task_table import TaskRow, as_json, row
from mlora_worker.lines import headed, one_line


def outcome(rows: Iterable[TaskRow], wanted: frozenset[str]) -> int | None:
    """The exit code once all wanted tasks (all there are, when none is named) have finished; None before."""
    shown = [one for one in rows if not wanted or one.name in wanted]
    if not shown or wanted - {one.name for one in shown} or not all(one.finished for one in shown):
        return None
    return exit_codes.FAILED if any(one.failed for one in shown) else exit_codes.OK


def table(rows: Iterable[TaskRow], *, everywhere: bool = False) -> RenderableType:
    """Running tasks by priority, then the others. ``everywhere``: with their namespaces."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for name in (*(("NAMESPACE",) if everywhere else ()), "NAME", "STATE", "REASON"):
        shown.add_column(name)
    for name in ("PRIORITY", "PROGRESS", "LOSS", "TOKENS/S", "ETA"):
        shown.add_column(name, justify="right")
    for one in sorted(rows, key=lambda one: (one.finished, -one.priority, one.namespace, one.name)):
        style = "red" if one.failed else "green" if one.succeeded else ""
        progress = f"{one.step}/{one.total_steps}" if one.total_steps else ""
        shown.add_row(
            *((Text(one_line(one.namespace)),) if everywhere else ()),
            Text(one_line(one.name)),
            Text(one_line(one.state), style=style),
            Text(one_line(one.reason)),
            str(one.priority),
            progress,
            Text(one_line(one.loss or "")),
            Text(one_line(one.tokens_per_second or "")),
            Text(one_line(one.eta or "")),
        )
    return shown


def watch(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Tasks to watch. Default: all.")
    ] = None,
    namespace: NamespaceOption = None,
    all_namespaces: AllNamespacesOption = False,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
    timeout: TimeoutOption = None,
    output: OutputOption = OutputFormat.TEXT,
) -> None:
    """Show tasks as they train, until all have finished.

    The exit code is 0 when all tasks succeeded, and 1 when one failed.
    """
    wanted = frozenset(names or ())
    if wanted and all_namespaces:
        raise CommandError(
            "-A watches all tasks: leave the names out, or name the namespace with -n", exit_codes.INVALID
        )
    view: WatchView = JsonRows() if output is OutputFormat.JSON else Screen(everywhere=all_namespaces)
    choice = ClusterChoice(namespace, context, kubeconfig)
    try:
        code = asyncio.run(_watch(wanted, choice, timeout, view, everywhere=all_namespaces))
    except TimeoutError:
        message = f"not all tasks finished within {timeout:g} seconds"
        raise CommandError(message, exit_codes.TIMEOUT) from None
    raise typer.Exit(code)


class WatchView(Protocol):
    """Where the rows go. Entered before the first and left after the last ones."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *_: object) -> None: ...

    def show(self, rows: Mapping[str, TaskRow]) -> None:
        """The rows by name, or by namespace/name, as they are now."""


class JsonRows:
    """One JSON object for each task that changed."""

    def __init__(self) -> None:
        self._shown: Mapping[str, TaskRow] = {}

    def __enter__(self) -> JsonRows:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, rows: Mapping[str, TaskRow]) -> None:
        for name, one in rows.items():
            if one != self._shown.get(name):
                print_json(as_json(one))
        for key in self._shown.keys() - rows.keys():
            gone = self._shown[key]
            print_json({"namespace": gone.namespace, "name": gone.name, "deleted": True})
        self._shown = rows


class Screen:
    """A table, redrawn in place on a terminal; in a log file it is printed once, at the end."""

    def __init__(self, *, everywhere: bool = False) -> None:
        self._everywhere = everywhere
        self._live = Live(console=stdout(), refresh_per_second=4)
        self._rows: Mapping[str, TaskRow] = {}

    def __enter__(self) -> Screen:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()
        for one in self._rows.values():
            if one.failed:
                called = f"{one.namespace}/{one.name}" if self._everywhere else one.name
                stderr().print(Text(headed(f"{called}: {one.reason}: {one.message}"), style="red"))

    def show(self, rows: Mapping[str, TaskRow]) -> None:
        self._live.update(table(rows.values(), everywhere=self._everywhere))
        self._rows = rows


async def _watch(
    wanted: frozenset[str], choice: ClusterChoice, seconds: float | None, view: WatchView, *, everywhere: bool
) -> int:
    from mlora_operator.cli.kube.cluster import connect
    from mlora_operator.cli.kube.retry import RetryTimeouts
    from mlora_operator.cli.submit.follow import follow

    async with asyncio.timeout(seconds), connect(choice) as cluster:
        name = next(iter(wanted)) if len(wanted) == 1 else None
        namespace = None if everywhere else cluster.namespace
        tasks = follow(cluster, namespace, name, RetryTimeouts(), time.monotonic, asyncio.sleep)
        with view:
            async with aclosing(tasks):
                async for known in tasks:
                    rows = {name: row(one) for name, one in known.items()}
                    _check_there(rows, wanted, namespace)
                    shown = _only(rows, wanted)
                    view.show(shown)
                    code = outcome(shown.values(), wanted)
                    if code is not None:
                        return code
    raise AssertionError("follow() never ends by itself")


def _only(rows: Mapping[str, TaskRow], wanted: frozenset[str]) -> dict[str, TaskRow]:
    return {name: one for name, one in rows.items() if not wanted or name in wanted}


def _check_there(rows: Mapping[str, TaskRow], wanted: frozenset[str], namespace: str | None) -> None:
    where = "any namespace" if namespace is None else f"namespace {namespace!r}"
    missing = sorted(wanted - rows.keys())
    if missing:
        message = f"no loratask {', '.join(missing)} in {where}"
        raise CommandError(message, exit_codes.NOT_FOUND)
    if not rows:
        raise CommandError(f"there are no loratasks in {where}", exit_codes.NOT_FOUND)
