"""``mlora get``: one task, or some, in full."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated

import typer
from rich.text import Text

from mlora_operator.api import API_VERSION, task
from mlora_operator.cli.kube.choice import ClusterChoice
from mlora_operator.cli.objects import JSON, as_documents, json_of, yaml_of
from mlora_operator.cli.options import ContextOption, KubeconfigOption, NamesArgument, NamespaceOption
from mlora_operator.cli.output import stdout
from mlora_operator.cli.program import program
from mlora_operator.cli.show.details import details
from mlora_operator.cli.task_table import row
from mlora_worker.lines import headed

_TITLES = 12  # characters before a line's text


class GetFormat(StrEnum):
    TEXT = "text"
    JSON = "json"
    YAML = "yaml"


def get(
    names: NamesArgument,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
    output: Annotated[
        GetFormat,
        typer.Option("--output", "-o", help="text for people; json, yaml: the object, as kubectl prints it."),
    ] = GetFormat.TEXT,
) -> None:
    """Show a task: what it trains, how far it is, which rows were dropped, why it waits, where its adapter is."""
    tasks = asyncio.run(_tasks(names, ClusterChoice(namespace, context, kubeconfig)))
    if output is GetFormat.TEXT:
        for number, found in enumerate(tasks):
            if number:
                stdout().print()
            _print(found)
        return
    document = as_documents(tasks, one=len(tasks) == 1)
    print(json_of(document) if output is GetFormat.JSON else yaml_of(document))


async def _tasks(names: Sequence[str], choice: ClusterChoice) -> list[JSON]:
    from mlora_operator.cli.kube.cluster import connect

    async with connect(choice) as cluster:
        found = [await cluster.task(name) for name in names]
    return [{"apiVersion": API_VERSION, "kind": task.KIND} | one for one in found]


def _print(found: JSON) -> None:
    shown = row(found)
    style = "red" if shown.failed else "green" if shown.succeeded else ""
    for title, text in details(found, datetime.now(UTC), program()):
        line = headed(text).replace("\n", "\n" + " " * _TITLES)
        stdout().print(
            Text.assemble((f"{title:<{_TITLES}}", "bold"), (line, style if title == "state" else ""))
        )
