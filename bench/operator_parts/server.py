"""The API server of the test cluster, as a user's tools speak to it: straight, not by the operator's way."""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp
import yaml

JSON = dict[str, Any]
LONGEST_LINE = 1 << 24  # bytes of one object in a watch
PATIENCE = 30.0  # seconds for one request
PAUSE = 0.5  # seconds before a watch that was refused is begun again


@dataclass(frozen=True, slots=True)
class Access:
    """What a kubeconfig of the test cluster says. ``authority``: PEM of its certificates."""

    url: str
    authority: str
    token: str

    def through(self, url: str) -> JSON:
        """A kubeconfig that leads to ``url``, with the same rights."""
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "bench", "cluster": {"server": url}}],
            "users": [{"name": "bench", "user": {"token": self.token}}],
            "contexts": [{"name": "bench", "context": {"cluster": "bench", "user": "bench"}}],
            "current-context": "bench",
        }


def access(kubeconfig: Path) -> Access:
    """Of the first cluster and user in it."""
    content = json.loads(kubeconfig.read_text())
    cluster = content["clusters"][0]["cluster"]
    authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
    return Access(cluster["server"], authority, content["users"][0]["user"]["token"])


class Server:
    """Requests in JSON; an async context manager. Each raises RuntimeError with the server's words."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Server:
        trust = ssl.create_default_context(cadata=self._access.authority)
        self._session = aiohttp.ClientSession(
            base_url=self._access.url,
            connector=aiohttp.TCPConnector(ssl=trust, limit=64),
            headers={"Authorization": f"Bearer {self._access.token}"},
            read_bufsize=LONGEST_LINE,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._open.close()

    async def get(self, path: str) -> JSON:
        return await self._ask("GET", path)

    async def create(self, path: str, manifest: Mapping[str, Any]) -> JSON:
        return await self._ask("POST", path, manifest)

    async def try_create(
        self, path: str, manifest: Mapping[str, Any], patience: float = PATIENCE
    ) -> int | None:
        """The HTTP status, whatever the server says of it; None where it says nothing for ``patience``, or hangs up."""
        body, headers = json.dumps(manifest), {"Content-Type": "application/json"}
        timeout = aiohttp.ClientTimeout(total=patience)
        try:
            async with self._open.post(path, data=body, headers=headers, timeout=timeout) as answer:
                await answer.read()
                return answer.status
        except (TimeoutError, aiohttp.ClientError):
            return None

    async def apply(self, path: str, manifest: Mapping[str, Any]) -> JSON:
        """Server-side apply."""
        query = "?fieldManager=bench&force=true"
        return await self._ask("PATCH", path + query, manifest, "application/apply-patch+yaml")

    async def delete(self, path: str) -> None:
        await self._ask("DELETE", path)

    async def watch(self, path: str, version: str) -> AsyncIterator[JSON]:
        """Events after ``version``, for as long as the server goes on. One of type ERROR, and the end, where it refuses, as
        it does for a moment after a definition has changed: ask for a list, and watch on from there."""
        query = f"?watch=true&resourceVersion={version}&allowWatchBookmarks=true"
        timeout = aiohttp.ClientTimeout(total=None)
        try:
            async with self._open.get(path + query, timeout=timeout) as answer:
                if answer.status == 200:
                    async for line in answer.content:
                        yield json.loads(line)
                    return
        except (aiohttp.ClientError, ValueError):  # it hung up, perhaps within a line
            pass
        await asyncio.sleep(PAUSE)
        yield {"type": "ERROR"}

    async def _ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
    ) -> JSON:
        async with self._open.request(
            method,
            path,
            data=None if body is None else json.dumps(body),
            headers={"Content-Type": content_type},
            timeout=aiohttp.ClientTimeout(total=PATIENCE),
        ) as answer:
            content: JSON = await answer.json()
            if answer.status >= 400:
                raise RuntimeError(f"{method} {path}: {answer.status}: {content.get('message')}")
            return content

    @property
    def _open(self) -> aiohttp.ClientSession:
        assert self._session is not None, "use as a context manager"
        return self._session


async def install_resources(server: Server, files: Iterable[Path]) -> None:
    """The custom resources of these files; returns once they are served."""
    for wanted in [yaml.safe_load(text) for text in await asyncio.to_thread(_texts, files)]:
        path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{wanted['metadata']['name']}"
        await server.apply(path, wanted)
        async with asyncio.timeout(PATIENCE):
            while not _is_established(await server.get(path)):  # noqa: ASYNC110  (nobody tells)
                await asyncio.sleep(0.1)


def _texts(files: Iterable[Path]) -> list[str]:
    return [file.read_text() for file in files]


def _is_established(found: Mapping[str, Any]) -> bool:
    conditions = found.get("status", {}).get("conditions") or ()
    return any(one["type"] == "Established" and one["status"] == "True" for one in conditions)


async def refuse_company(server: Server) -> None:
    """An installed operator that looks at all namespaces would answer, too. Raises RuntimeError."""
    labels = "labelSelector=app.kubernetes.io%2Fname%3Dmlora-operator"
    for one in (await server.get(f"/apis/apps/v1/deployments?{labels}"))["items"]:
        if one["spec"]["replicas"]:
            meta = one["metadata"]
            raise RuntimeError(
                f"an operator is installed in namespace {meta['namespace']}: "
                f"kubectl scale --replicas=0 deployment/{meta['name']} first"
            )
