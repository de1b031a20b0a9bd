"""Requests to the API server in plain JSON, over the async client of the ``kubernetes`` package.

Server-side apply keeps every write idempotent: the server itself finds out whether anything changes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from kubernetes.aio import client

from mlora_operator.api.paths import checked, collection, item
from mlora_operator.manifests.names import FIELD_MANAGER
from mlora_operator.reconcile.cluster.pages import UNPACKED, Expired, pages, read_at_most

JSON = dict[str, Any]

APPLY = "application/apply-patch+yaml"  # JSON is YAML
MERGE = "application/merge-patch+json"
# What of an object's metadata a list holds when only identities matter.
METADATA_ONLY = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
REQUEST_TIMEOUT = 30.0
_LONGEST_WORDS = 500  # characters of an answer that is not an object

PLURALS = {
    "LoRATask": "loratasks",
    "LoRAPipeline": "lorapipelines",
    "Service": "services",
    "Secret": "secrets",
    "StatefulSet": "statefulsets",
    "Pod": "pods",
    "Event": "events",
    "Lease": "leases",
    "NetworkPolicy": "networkpolicies",
}


# What a request was about may be no more than these, whatever a path holds.
RESOURCES = frozenset({*PLURALS.values(), "configmaps", "namespaces"})

# Is told of each request: method, what it was about, HTTP status (None: no answer), seconds.
Tally = Callable[[str, str, int | None, float], None]


class ApiError(Exception):
    """The API server refused a request; ``status`` is HTTP's, the message its own."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class KubeApi:
    """Thin verbs. Each raises ApiError, or the client's own error when there is no answer; UnsafePath where a name is none.

    ``permit`` is called just before each write and raises when there must be none; ``tally`` after each request.
    """

    def __init__(
        self,
        api: client.ApiClient,
        permit: Callable[[], None] = lambda: None,
        tally: Tally | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = api
        self._permit = permit
        self._tally = tally
        self._monotonic = monotonic

    async def get(self, path: str) -> JSON:
        return await self._call("GET", path)

    async def list_identities(
        self, api_version: str, plural: str, namespace: str | None, labels: str
    ) -> set[str]:
        """The uids of all objects of a kind."""
        path = collection(api_version, plural, namespace)
        query = {"labelSelector": labels} if labels else {}

        async def ask(params: Mapping[str, str], most: int | None) -> bytes | None:
            try:
                return await self._text("GET", path, params, accept=METADATA_ONLY, most=most)
            except ApiError as error:
                if error.status == 410:
                    raise Expired from error
                raise

        # Go writes an empty list of metadata as null.
        return {
            item["metadata"]["uid"] async for page in pages(ask, query) for item in page.get("items") or ()
        }

    async def apply(self, manifest: JSON) -> JSON:
        """Server-side apply. Fields of others stay; ours are taken back when someone changed them."""
        query = {"fieldManager": FIELD_MANAGER, "force": "true"}
        return await self._call("PATCH", path_of(manifest), query, manifest, APPLY)

    async def create(self, manifest: JSON) -> JSON:
        meta = manifest["metadata"]
        path = collection(manifest["apiVersion"], PLURALS[manifest["kind"]], meta["namespace"])
        return await self._call("POST", path, {"fieldManager": FIELD_MANAGER}, manifest, "application/json")

    async def merge_status(self, path: str, patch: JSON) -> None:
        """The answer, which is the whole object, is not read: the watch brings it."""
        query = {"fieldManager": FIELD_MANAGER}
        await self._call("PATCH", f"{path}/status", query, patch, MERGE, reads_answer=False)

    async def merge(self, path: str, patch: JSON) -> JSON:
        """Merge patch. With ``metadata.resourceVersion`` in it, of that very version (else 409)."""
        return await self._call("PATCH", path, {"fieldManager": FIELD_MANAGER}, patch, MERGE)

    async def delete(self, path: str, uid: str) -> None:
        """Delete this very object, not a later one of the same name."""
        body = {"preconditions": {"uid": uid}}
        await self._call("DELETE", path, {}, body, "application/json")

    async def _call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: JSON | None = None,
        content_type: str | None = None,
        *,
        reads_answer: bool = True,
    ) -> JSON:
        """The answer; empty unless ``reads_answer``. Raises ApiError, and UnsafePath before anything is sent."""
        text = await self._text(method, path, query, body, content_type)
        return dict(json.loads(text)) if text and reads_answer else {}

    async def _text(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: JSON | None = None,
        content_type: str | None = None,
        accept: str = "application/json",
        most: int | None = None,
    ) -> bytes | None:
        """The answer as it comes; None where it has more than ``most`` bytes. Raises as ``_call`` does."""
        checked(path)
        headers = {"Accept": accept} | ({"Content-Type": content_type} if content_type else {})
        if most is not None:
            headers |= UNPACKED
        request = await self._api.param_serialize(
            method,
            path,
            query_params=list((query or {}).items()),
            header_params=headers,
            body=body,
            auth_settings=["BearerToken"],
        )
        if method != "GET":
            self._permit()
        begun, status = self._monotonic(), None
        try:
            answer = await self._api.call_api(*request, _request_timeout=REQUEST_TIMEOUT)
            text = await (answer.read() if most is None else _at_most(answer, most))
            status = answer.status
        finally:
            if self._tally is not None:
                self._tally(method, resource_of(path), status, self._monotonic() - begun)
        refused = answer.status >= 400
        if refused:
            raise ApiError(answer.status, _words(text or b"") or str(answer.reason))
        return text


async def _at_most(answer: Any, most: int) -> bytes | None:
    """What an answer of the client holds; None, and its connection closed, where that is more."""
    text = await read_at_most(answer.response.content.iter_any(), most)
    if text is None:
        answer.response.close()
    return text


def _words(text: bytes) -> str:
    """Of a refusal. What stands before the API server, or a kind that it does not serve, answers with plain text."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return text.decode(errors="replace").strip()[:_LONGEST_WORDS]
    found = content.get("message") if isinstance(content, dict) else None
    return found if isinstance(found, str) else ""


def path_of(manifest: Mapping[str, Any]) -> str:
    """Path of one object."""
    meta = manifest["metadata"]
    return item(manifest["apiVersion"], PLURALS[manifest["kind"]], meta["namespace"], meta["name"])


def resource_of(path: str) -> str:
    """Plural of what a path is about, with ``/status`` where it is that; ``other`` for what the operator does not use."""
    parts = path.strip("/").split("/")
    rest = parts[2:] if parts[0] == "api" else parts[3:]
    if len(rest) > 2 and rest[0] == "namespaces":
        rest = rest[2:]
    if not rest or rest[0] not in RESOURCES:
        return "other"
    return f"{rest[0]}/status" if rest[2:] == ["status"] else rest[0]
