"""Requests to the cluster that the user's kubeconfig names, in plain JSON.

Imported by the commands only when they run: the Kubernetes client takes seconds to load.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from kubernetes.aio import client, config
from kubernetes.aio.config import ConfigException

from mlora_operator.api.paths import checked
from mlora_operator.cli import exit_codes
from mlora_operator.cli.kube.choice import ClusterChoice
from mlora_operator.cli.output import CommandError
from mlora_operator.cli.pipes import as_file

JSON = dict[str, Any]

APPLY = "application/apply-patch+yaml"  # JSON is YAML
MERGE = "application/merge-patch+json"

_PATIENCE = 30.0  # seconds for one answer
_IN_POD = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class KubeError(Exception):
    """The API server refused a request; ``status`` is HTTP's, the message its own words."""

    def __init__(self, status: int, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


class KubeConnection:
    """A connection, with the context's namespace. Made by ``open_api``; ``close`` it."""

    def __init__(self, api: Any, namespace: str, choice: ClusterChoice) -> None:
        self.namespace = namespace
        self._api = api
        self._choice = choice

    async def close(self) -> None:
        await self._api.close()

    async def renew(self) -> None:
        """Read the kubeconfig again: tokens of the cluster's login programs end after minutes.

        Raises CommandError when it is no longer there.
        """
        former = self._api
        self._api = (await open_api(self._choice))._api
        await former.close()

    async def request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: JSON | None = None,
        content_type: str = "application/json",
    ) -> JSON:
        """Raises ApiError, or the client's own error when there is no answer; UnsafePath where a name is none."""
        answer = await self._send(method, path, query, body, content_type, _PATIENCE)
        content: JSON = _json(await answer.read())
        if answer.status >= 400:
            raise _error(answer.status, content, str(answer.reason))
        return content

    async def lines(self, path: str, query: Mapping[str, str], seconds: float) -> AsyncIterator[JSON]:
        """What a watch sends, a JSON object a line, for at most ``seconds``. Raises as ``request`` does."""
        answer = await self._send("GET", path, query, None, "application/json", seconds)
        try:
            if answer.status >= 400:
                raise _error(answer.status, _json(await answer.read()), str(answer.reason))
            async for line in answer.response.content:
                yield json.loads(line)
        finally:
            answer.response.release()

    async def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        body: JSON | None,
        content_type: str,
        seconds: float,
    ) -> Any:
        request = await self._api.param_serialize(
            method,
            checked(path, any_kind=True),
            query_params=list((query or {}).items()),
            header_params={"Accept": "application/json", "Content-Type": content_type},
            body=body,
            auth_settings=["BearerToken"],
        )
        return await self._api.call_api(*request, _request_timeout=seconds)


async def open_api(choice: ClusterChoice) -> KubeConnection:
    """By --kubeconfig, KUBECONFIG or ~/.kube/config, or a pod's own account. Raises CommandError when there is none."""
    context = choice.context
    named = choice.kubeconfig and str(as_file(choice.kubeconfig))
    files = named or os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
    configuration = client.Configuration()
    if not any(Path(file).exists() for file in files.split(os.pathsep)):  # noqa: ASYNC240
        if context is None and choice.kubeconfig is None and _IN_POD.exists():  # noqa: ASYNC240
            config.load_incluster_config(client_configuration=configuration)
            namespace = _IN_POD.read_text().strip()  # noqa: ASYNC240
            return KubeConnection(client.ApiClient(configuration), namespace, choice)
        message = f"no kubeconfig at {files}; set KUBECONFIG or --kubeconfig to the file of your cluster"
        raise CommandError(message, exit_codes.UNREACHABLE)
    try:
        # Named, since the client reads the environment only once, when it is loaded.
        await config.load_kube_config(files, context, client_configuration=configuration)
        contexts, active = config.list_kube_config_contexts(files)
        if context is not None:
            active = next(one for one in contexts if one["name"] == context)
        namespace = str(active["context"].get("namespace") or "default")
    except (ConfigException, yaml.YAMLError, OSError, UnicodeError) as error:
        words = error.strerror if isinstance(error, OSError) else error
        raise CommandError(f"no usable kubeconfig at {files}: {words}", exit_codes.UNREACHABLE) from error
    except (AttributeError, KeyError, TypeError, ValueError, StopIteration) as error:  # of another shape
        message = f"no usable kubeconfig at {files}: it does not hold clusters, users and contexts"
        raise CommandError(message, exit_codes.UNREACHABLE) from error
    return KubeConnection(client.ApiClient(configuration), namespace, choice)


def _json(text: bytes) -> JSON:
    """The answer, or nothing where it is no JSON object: a proxy on the way speaks HTML."""
    try:
        content = json.loads(text) if text else {}
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _error(status: int, content: JSON, words: str) -> KubeError:
    return KubeError(status, content.get("message") or words, content.get("reason") or "")
