"""The cluster as far as the commands need it."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from mlora_operator.api import API_VERSION, pipeline, task
from mlora_operator.api.paths import UnsafePath, collection, item
from mlora_operator.cli import exit_codes
from mlora_operator.cli.kube.choice import ClusterChoice
from mlora_operator.cli.kube.client import APPLY, JSON, MERGE, KubeConnection, KubeError, open_api
from mlora_operator.cli.output import CommandError

FIELD_MANAGER = "mlora"
NO_ANSWER = (aiohttp.ClientError, TimeoutError, OSError)

_WATCH_SECONDS = 120  # the server ends a watch after so long
_WATCH_GRACE = 15  # and if it does not, the connection is dead


class KubeCluster:
    """Verbs on tasks and on whatever else stands in a user's files."""

    def __init__(self, api: KubeConnection, namespace: str) -> None:
        self.namespace = namespace
        self._api = api
        self._resources: dict[str, list[JSON]] = {}

    async def renew(self) -> None:
        await self._api.renew()

    # --- tasks ---

    async def task(self, name: str) -> JSON:
        """Raises CommandError when it is not there."""
        found = await self.find_task(self.namespace, name)
        if found is None:
            message = f"no loratask {name!r} in namespace {self.namespace!r}"
            raise CommandError(message, exit_codes.NOT_FOUND)
        return found

    async def find_task(self, namespace: str, name: str) -> JSON | None:
        try:
            return await self._api.request("GET", _task_path(namespace, name))
        except KubeError as error:
            if error.status == 404 and error.reason == "NotFound":
                return None
            raise

    async def tasks(self, namespace: str | None, name: str | None = None) -> tuple[list[JSON], str]:
        """All tasks of a namespace, or of all, or the one of a name; and the version to watch from."""
        path = collection(API_VERSION, task.PLURAL, namespace)
        found = await self._api.request("GET", path, _selected(name))
        return found["items"], found["metadata"]["resourceVersion"]

    async def task_events(
        self, namespace: str | None, version: str, name: str | None = None
    ) -> AsyncIterator[JSON]:
        """Changes after ``version``, until the server closes the watch. Raises ApiError, too old a version's too."""
        query = _selected(name) | {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(_WATCH_SECONDS),
        }
        path = collection(API_VERSION, task.PLURAL, namespace)
        async for event in self._api.lines(path, query, _WATCH_SECONDS + _WATCH_GRACE):
            if event["type"] == "ERROR":
                status = event["object"]
                raise KubeError(
                    status.get("code") or 500, status.get("message", ""), status.get("reason", "")
                )
            yield event

    async def suspend(self, namespace: str, name: str, *, suspended: bool = True) -> None:
        await self._change(namespace, name, {"spec": {"suspend": suspended}})

    async def annotate(self, namespace: str, name: str, annotation: str, value: str) -> None:
        await self._change(namespace, name, {"metadata": {"annotations": {annotation: value}}})

    async def _change(self, namespace: str, name: str, patch: JSON) -> None:
        query = {"fieldManager": FIELD_MANAGER}
        await self._api.request("PATCH", _task_path(namespace, name), query, patch, MERGE)

    async def delete(self, namespace: str, name: str, uid: str) -> None:
        """Delete this very task, not a later one of the same name; fine when it is gone."""
        body = {"preconditions": {"uid": uid}}
        try:
            await self._api.request("DELETE", _task_path(namespace, name), {}, body)
        except KubeError as error:
            if error.status not in (404, 409):
                raise

    async def warnings_about(self, namespace: str, uid: str) -> list[JSON]:
        """Warning events about an object, oldest first; none when this user may not see them."""
        try:
            return await self._events(namespace, uid, ",type=Warning")
        except KubeError:
            return []

    async def events_about(self, namespace: str, uid: str) -> list[JSON]:
        """Events about an object, oldest first; none when this user may not see them: conditions are shown all the same."""
        try:
            return await self._events(namespace, uid)
        except KubeError as error:
            if error.status != 403:
                raise
            return []

    async def _events(self, namespace: str, uid: str, further: str = "") -> list[JSON]:
        """``further``: other conditions of the selector."""
        query = {"fieldSelector": f"involvedObject.uid={uid}{further}"}
        found = await self._api.request("GET", collection("v1", "events", namespace), query)
        return sorted(found["items"], key=lambda one: one.get("lastTimestamp") or one.get("eventTime") or "")

    # --- tasks or pipelines ---

    async def objects(self, plural: str, namespace: str | None, labels: str | None) -> list[JSON]:
        """As the API server gives them, of one namespace or of all, those with ``labels`` (a selector)."""
        query = {} if labels is None else {"labelSelector": labels}
        found = await self._api.request("GET", collection(API_VERSION, plural, namespace), query)
        kind = {task.PLURAL: task.KIND, pipeline.PLURAL: pipeline.KIND}[plural]
        return [{"apiVersion": API_VERSION, "kind": kind} | one for one in found["items"]]

    # --- any object ---

    async def apply(self, manifest: JSON, *, force: bool, dry_run: bool = False) -> JSON:
        """Server-side apply; without ``force``, fields that others set otherwise make a 409."""
        query = {"fieldManager": FIELD_MANAGER, "force": "true" if force else "false"}
        query |= {"dryRun": "All"} if dry_run else {}
        return await self._api.request("PATCH", await self._path_of(manifest), query, manifest, APPLY)

    async def try_create(self, manifest: JSON) -> None:
        """Ask whether an object like this would be taken, whatever has its name now."""
        meta = manifest["metadata"]
        other_name = {**meta, "generateName": "mlora-"}
        del other_name["name"]
        query = {"fieldManager": FIELD_MANAGER, "dryRun": "All"}
        path = (await self._path_of(manifest)).rsplit("/", 1)[0]
        await self._api.request("POST", path, query, manifest | {"metadata": other_name})

    async def is_namespaced(self, manifest: JSON) -> bool:
        """Raises CommandError when the cluster does not know the kind."""
        return bool((await self._resource(manifest))["namespaced"])

    async def secret(self, name: str, namespace: str | None = None) -> dict[str, str]:
        """The decoded Secret. Raises CommandError when it is not there or not for this user."""
        try:
            path = item("v1", "secrets", namespace or self.namespace, name)
            secret = await self._api.request("GET", path)
        except KubeError as error:
            if error.status in (403, 404):
                message = (
                    f"secret/{name} cannot be read: {error.reason}; give the adapter's s3:// address instead"
                )
                raise CommandError(message, exit_codes.UNREACHABLE) from error
            raise
        return texts_of(secret)

    async def _path_of(self, manifest: JSON) -> str:
        resource = await self._resource(manifest)
        meta = manifest["metadata"]
        place = f"/namespaces/{meta['namespace']}" if resource["namespaced"] else ""
        return f"{_root(manifest['apiVersion'])}{place}/{resource['name']}/{meta['name']}"

    async def _resource(self, manifest: JSON) -> JSON:
        version, kind = manifest["apiVersion"], manifest["kind"]
        if version not in self._resources:
            try:
                self._resources[version] = (await self._api.request("GET", _root(version)))["resources"]
            except KubeError as error:
                if error.status != 404:
                    raise
                self._resources[version] = []
        for resource in self._resources[version]:
            if resource["kind"] == kind and "/" not in resource["name"]:
                return resource
        del self._resources[version]  # a CRD may come
        raise CommandError(
            f"the cluster has no {kind} in {version}: install the chart's CRDs", exit_codes.NOT_FOUND
        )


def texts_of(secret: JSON) -> dict[str, str]:
    """What a Secret holds. What is no text, such as a key store, can be no key and reads as empty."""
    return {key: _text(value) for key, value in (secret.get("data") or {}).items()}


def _text(value: str) -> str:
    try:
        return base64.b64decode(value).decode()
    except ValueError:
        return ""


def _root(api_version: str) -> str:
    return f"/apis/{api_version}" if "/" in api_version else f"/api/{api_version}"


def _task_path(namespace: str, name: str) -> str:
    return item(API_VERSION, task.PLURAL, namespace, name)


def _selected(name: str | None) -> dict[str, str]:
    return {} if name is None else {"fieldSelector": f"metadata.name={name}"}


@asynccontextmanager
async def connect(choice: ClusterChoice) -> AsyncIterator[KubeCluster]:
    """A connection by the user's kubeconfig, or a pod's own account. Raises CommandError.

    Inside, errors of the API server and of the way to it become CommandErrors too.
    """
    api = await open_api(choice)
    try:
        yield KubeCluster(api, choice.namespace or api.namespace)
    except KubeError as error:
        raise refused(error) from error
    except UnsafePath as error:  # before anything was sent
        raise CommandError(
            f"{error.part!r} is not a name that Kubernetes can have", exit_codes.INVALID
        ) from error
    except NO_ANSWER as error:
        raise CommandError(
            f"the cluster does not answer: {error or type(error).__name__}", exit_codes.UNREACHABLE
        ) from error
    finally:
        await api.close()


def refused(error: KubeError) -> CommandError:
    """What the API server's refusal means to the user."""
    if error.status == 401:
        return CommandError("the cluster rejected your credentials: log in again", exit_codes.UNREACHABLE)
    if error.status == 403:
        return CommandError(f"the cluster denied the request: {error}", exit_codes.UNREACHABLE)
    if error.status == 404 and error.reason != "NotFound":
        return CommandError("not found: check that the chart's CRDs are installed", exit_codes.NOT_FOUND)
    return CommandError(f"the cluster answered {error.status}: {error}", exit_codes.UNREACHABLE)
