"""The cluster that the user's kubeconfig names, as far as the commands need it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import typer
import yaml
from kubernetes.aio import client, config
from kubernetes.aio.config import ConfigException

from mlora_operator.cli import exit_codes
from mlora_operator.cli.output import CommandError

NamespaceOption = Annotated[
    str | None, typer.Option("--namespace", "-n", help="Namespace; by default that of the context.")
]
ContextOption = Annotated[str | None, typer.Option("--context", help="Context of the kubeconfig to use.")]


_IN_POD = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class Cluster:
    """A connection with its default namespace."""

    def __init__(self, api: Any, namespace: str) -> None:
        self.api = api
        self.namespace = namespace


@asynccontextmanager
async def connect(context: str | None, namespace: str | None) -> AsyncIterator[Cluster]:
    """A connection by KUBECONFIG or ~/.kube/config, or a pod's own account. Raises CommandError.

    Inside, errors of the API server and of the way to it become CommandErrors too.
    """
    try:
        own = await _configure(context)
        async with client.ApiClient() as api:
            yield Cluster(api, namespace or own)
    except client.ApiException as error:
        raise refused(error) from error
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise CommandError(f"the cluster does not answer: {error}", exit_codes.UNREACHABLE) from error


async def _configure(context: str | None) -> str:
    """Sets the client's configuration; the default namespace."""
    files = os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
    if not any(Path(file).exists() for file in files.split(os.pathsep)):  # noqa: ASYNC240
        if context is None and _IN_POD.exists():  # noqa: ASYNC240
            config.load_incluster_config()
            return _IN_POD.read_text().strip()  # noqa: ASYNC240
        message = f"no kubeconfig at {files}; set KUBECONFIG to the file of your cluster"
        raise CommandError(message, exit_codes.UNREACHABLE)
    try:
        await config.load_kube_config(context=context)
        contexts, active = config.list_kube_config_contexts()
        if context is not None:
            active = next(one for one in contexts if one["name"] == context)
        return str(active["context"].get("namespace") or "default")
    except (ConfigException, yaml.YAMLError, KeyError, TypeError, StopIteration) as error:
        raise CommandError(f"no usable kubeconfig at {files}: {error}", exit_codes.UNREACHABLE) from error


def refused(error: Any) -> CommandError:
    """What the API server's refusal means to the user."""
    if error.status in (401, 403):
        return CommandError(f"the cluster refuses: {error.reason}", exit_codes.UNREACHABLE)
    if error.status == 404:
        return CommandError("not found; are the CRDs of the chart installed?", exit_codes.NOT_FOUND)
    return CommandError(f"the cluster answers {error.status}: {error.reason}", exit_codes.UNREACHABLE)
