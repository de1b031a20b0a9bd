"""Which adapters the tasks of a cluster have: those with given labels that have succeeded."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from mlora_operator.api import task
from mlora_operator.cli.fetch.adapter_of_task import access_to, spec_of
from mlora_operator.cli.kube.choice import ClusterChoice
from mlora_operator.cli.kube.client import JSON
from mlora_operator.cli.kube.cluster import KubeCluster, connect
from mlora_operator.cli.output import CommandError
from mlora_operator.cli.task_table import row
from mlora_operator.download import open_source
from mlora_operator.sync import AdapterPlace, News, Places
from mlora_operator.sync.news import problem
from mlora_operator.sync.places import UnusableName, check_name

Secrets = dict[tuple[str, str], Mapping[str, str]]


def labelled_tasks(labels: str, choice: ClusterChoice, everywhere: bool, endpoint: str | None) -> Places:
    """Tasks that have not succeeded hold their names: what an earlier task of that name left stays meanwhile.

    Raises CommandError where the cluster cannot be asked.
    """
    return asyncio.run(_labelled_tasks(labels, choice, everywhere, endpoint))


async def _labelled_tasks(
    labels: str, choice: ClusterChoice, everywhere: bool, endpoint: str | None
) -> Places:
    found: list[AdapterPlace] = []
    held: set[str] = set()
    problems: list[News] = []
    secrets: Secrets = {}
    async with connect(choice) as cluster:
        namespace = None if everywhere else cluster.namespace
        for one in await cluster.objects(task.PLURAL, namespace, labels):
            shown = row(one)
            if not shown.succeeded:
                held.add(shown.name)
                continue
            try:
                found.append(await _place(cluster, one, endpoint, secrets))
            except (CommandError, UnusableName, ValueError) as error:
                held.add(shown.name)
                problems.append(problem(shown.name, f"loratask/{shown.name}", error))
    return Places(tuple(found), frozenset(held), tuple(problems))


async def _place(cluster: KubeCluster, one: JSON, endpoint: str | None, secrets: Secrets) -> AdapterPlace:
    """Raises CommandError, UnusableName, ValueError."""
    shown, spec = row(one), spec_of(one)
    check_name(shown.name)
    keys: Mapping[str, str] = {}
    if spec.storage.secret_ref is not None:
        asked = (shown.namespace, spec.storage.secret_ref.name)
        if asked not in secrets:
            secrets[asked] = await cluster.secret(asked[1], asked[0])
        keys = secrets[asked]
    uri = (shown.adapter or spec.output.uri).rstrip("/")
    source = open_source(uri, access_to(spec, keys, endpoint))
    return AdapterPlace(shown.name, uri, source, one["metadata"]["uid"])
