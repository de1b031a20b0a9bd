"""``mlora list``: the tasks of a namespace, or its pipelines."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated

import typer
from rich.text import Text

from mlora_operator.api import GROUP, pipeline, task
from mlora_operator.cli.kube.choice import ClusterChoice
from mlora_operator.cli.objects import JSON, as_documents, json_of, yaml_of
from mlora_operator.cli.options import (
    AllNamespacesOption,
    ContextOption,
    KubeconfigOption,
    NamespaceOption,
)
from mlora_operator.cli.output import stderr, stdout
from mlora_operator.cli.show.aligned import aligned
from mlora_operator.cli.show.columns import PIPELINES, TASKS, table
from mlora_operator.cli.task_table import row


class ListFormat(StrEnum):
    TEXT = "text"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"
    NAME = "name"


def list_(
    pipelines: Annotated[
        bool, typer.Option("--pipelines", help="List LoRAPipelines instead of LoRATasks.")
    ] = False,
    selector: Annotated[
        str | None,
        typer.Option(
            "--selector", "-l", metavar="LABELS", help="Only objects with these labels, as in kubectl."
        ),
    ] = None,
    namespace: NamespaceOption = None,
    all_namespaces: AllNamespacesOption = False,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
    output: Annotated[
        ListFormat,
        typer.Option(
            "--output",
            "-o",
            help="text or wide: a table; json, yaml: the objects, as kubectl prints them; name: their names.",
        ),
    ] = ListFormat.TEXT,
) -> None:
    """List tasks with their state, step, loss and expected time to the last step, or list pipelines."""
    kind = pipeline if pipelines else task
    choice = ClusterChoice(namespace, context, kubeconfig)
    objects, searched = asyncio.run(_objects(kind.PLURAL, choice, selector, everywhere=all_namespaces))
    if output in (ListFormat.JSON, ListFormat.YAML):
        document = as_documents(objects, one=False)
        print(json_of(document) if output is ListFormat.JSON else yaml_of(document))
        return
    if output is ListFormat.NAME:
        for found in objects:
            stdout().print(Text(f"{kind.KIND.lower()}.{GROUP}/{found['metadata']['name']}"))
        return
    if not objects:
        stderr().print(f"there are no {kind.PLURAL} in {searched}", markup=False)
        return
    names, rows = table(
        PIPELINES if pipelines else TASKS,
        objects,
        datetime.now(UTC),
        wide=output is ListFormat.WIDE,
        everywhere=all_namespaces,
    )
    for line in aligned(names, rows, ["" if pipelines else _style(found) for found in objects]):
        stdout().print(line)


async def _objects(
    plural: str, choice: ClusterChoice, labels: str | None, *, everywhere: bool
) -> tuple[list[JSON], str]:
    """Sorted by namespace and name; and where they were searched for, in words."""
    from mlora_operator.cli.kube.cluster import connect

    async with connect(choice) as cluster:
        found = await cluster.objects(plural, None if everywhere else cluster.namespace, labels)
        searched = "any namespace" if everywhere else f"namespace {cluster.namespace!r}"
    return sorted(found, key=lambda one: (one["metadata"]["namespace"], one["metadata"]["name"])), searched


def _style(found: JSON) -> str:
    shown = row(found)
    return "red" if shown.failed else "green" if shown.succeeded else ""
