"""The cluster that the user's kubeconfig names, as far as the commands need it.

Imported by the commands only when they run: the Kubernetes client takes seconds to load.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from kubernetes.aio import client, config
from kubernetes.aio.config import ConfigException

from mlora_operator.api import GROUP, VERSION, task
from mlora_operator.cli import exit_codes
from mlora_operator.cli.output import CommandError

_WATCH_SECONDS = 30  # a watch is opened again after so long, and everything listed anew
_IN_POD = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class Cluster:
    """A connection with its default namespace."""

    def __init__(self, api: Any, namespace: str) -> None:
        self.namespace = namespace
        self._objects = client.CustomObjectsApi(api)
        self._core = client.CoreV1Api(api)

    async def task(self, name: str) -> dict[str, Any]:
        """Raises CommandError when it is not there."""
        try:
            found: dict[str, Any] = await self._objects.get_namespaced_custom_object(
                GROUP, VERSION, self.namespace, task.PLURAL, name
            )
        except client.ApiException as error:
            if error.status == 404:
                message = f"no loratask {name!r} in namespace {self.namespace!r}"
                raise CommandError(message, exit_codes.NOT_FOUND) from error
            raise
        return found

    async def secret(self, name: str) -> dict[str, str]:
        """The decoded Secret. Raises CommandError when it is not there or not for this user."""
        try:
            secret = await self._core.read_namespaced_secret(name, self.namespace)
        except client.ApiException as error:
            if error.status in (403, 404):
                message = (
                    f"secret/{name} cannot be read: {error.reason}; give the adapter's s3:// address instead"
                )
                raise CommandError(message, exit_codes.UNREACHABLE) from error
            raise
        return {key: base64.b64decode(value).decode() for key, value in (secret.data or {}).items()}

    async def tasks(self) -> tuple[list[dict[str, Any]], str]:
        """All tasks of the namespace, and the version to watch from."""
        found = await self._objects.list_namespaced_custom_object(GROUP, VERSION, self.namespace, task.PLURAL)
        return found["items"], found["metadata"]["resourceVersion"]

    async def task_events(self, version: str) -> AsyncIterator[dict[str, Any]]:
        """Changes after ``version``, until the server closes the watch or the version is too old."""
        response = await self._objects.list_namespaced_custom_object_without_preload_content(
            GROUP,
            VERSION,
            self.namespace,
            task.PLURAL,
            watch=True,
            resource_version=version,
            timeout_seconds=_WATCH_SECONDS,
        )
        try:
            async for line in response.content:
                event = json.loads(line)
                if event["type"] == "ERROR":
                    return
                yield event
        finally:
            response.release()


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
