"""The ``Cluster`` port over a real API server."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from mlora_operator.api import API_VERSION, pipeline, task
from mlora_operator.api import conditions as c
from mlora_operator.api.meta import timestamp
from mlora_operator.api.paths import item
from mlora_operator.certificates import end_of
from mlora_operator.manifests.names import FIELD_MANAGER, LABEL_MANAGED_BY
from mlora_operator.manifests.networkpolicy import network_policy
from mlora_operator.manifests.owner import Owner
from mlora_operator.manifests.secret import (
    CERTIFICATE_KEY,
    TOKEN_KEY,
    CertificatePair,
    tls_secret,
    token_secret,
)
from mlora_operator.manifests.service import service
from mlora_operator.manifests.statefulset import revision, statefulset
from mlora_operator.manifests.worker import HTTP_PORT, coordinator_host
from mlora_operator.reconcile.cluster.rest_client import JSON, ApiError, KubeApi
from mlora_operator.reconcile.ports import ClusterObjects, CoordinatorTrust, Gone, Raw, WriteRefused
from mlora_operator.reconcile.state.decision import DesiredWorkers, Event, Manifest
from mlora_operator.reconcile.state.decode import key_of
from mlora_operator.reconcile.state.log_fields import about_pipeline, about_task
from mlora_operator.reconcile.state.pods import read_groups
from mlora_operator.reconcile.state.snapshot import Key, Pipeline, Pod, SecretData, Task
from mlora_operator.settings import Settings

logger = logging.getLogger(__name__)
OURS = f"{LABEL_MANAGED_BY}={FIELD_MANAGER}"
EVENT_MESSAGE_LIMIT = 1024  # of the API
# Reasons of the ordinary course that are no object of their own: the conditions have them, with their times, and the log.
# Thousands of tasks would fill the API server's store with them.
UNTOLD = frozenset({c.REASON_ACCEPTED, c.REASON_ADMITTED, c.REASON_SAVING})


# HTTP statuses by which a StatefulSet is refused for what it holds, or by who may not have it.
REFUSALS = (400, 403, 413, 422)
LOOK_EVERY, LOOKS = 0.1, 50  # seconds, and how often before listing anew


@dataclass(frozen=True, slots=True)
class Indexes:
    """Views on what is watched; each gives the raw objects of one kind, from memory."""

    tasks: Callable[[], Iterable[Raw]]
    pipelines: Callable[[], Iterable[Raw]]
    statefulsets: Callable[[], Iterable[Raw]]
    services: Callable[[], Iterable[Raw]]
    pods: Callable[[], Iterable[Raw]]
    events: Callable[[], Iterable[Raw]]


class ApiServerCluster:
    """Reads from indexes, writes through ``KubeApi``. ``new_token`` makes a secret text, ``new_certificate`` one for a DNS
    name."""

    def __init__(
        self,
        api: KubeApi,
        indexes: Indexes,
        settings: Settings,
        new_token: Callable[[], str],
        new_certificate: Callable[[str], CertificatePair],
    ) -> None:
        self._api = api
        self._indexes = indexes
        self._settings = settings
        self._new_token = new_token
        self._new_certificate = new_certificate
        self._applied: dict[tuple[str, Key], tuple[JSON, str]] = {}
        self._policies: dict[Key, JSON] = {}  # as applied since the last audit; they are not watched
        self._vanished: set[str] = set()
        self._tokenless: set[Key] = set()  # pipelines without a token when one was last looked for
        self._certified: set[Key] = set()  # pipelines that had a certificate when one was last looked for

    # --- what is ---

    def objects(self) -> ClusterObjects:
        present = self._present
        pipelines = list(present(self._indexes.pipelines()))
        return ClusterObjects(
            tasks=list(present(self._indexes.tasks())),
            pipelines=pipelines,
            groups=read_groups(
                present(self._indexes.statefulsets()),
                present(self._indexes.pods()),
                self._indexes.events(),
                {key_of(one): one["metadata"]["uid"] for one in pipelines},
            ),
        )

    def revision(self, pipeline: Pipeline) -> str:
        assert pipeline.spec is not None
        settings = self._settings
        return revision(
            _owner(pipeline),
            pipeline.spec,
            settings.worker,
            settings.log.format,
            allow_file_uris=settings.allow_file_uris,
            tls=settings.coordinators_encrypt,
        )

    def coordinator_url(self, pipeline: Pipeline, scheme: str) -> str:
        return self._settings.coordinator_url.format(
            scheme=scheme,
            host=coordinator_host(_owner(pipeline)),
            port=HTTP_PORT,
            namespace=pipeline.key.namespace,
            name=pipeline.key.name,
        )

    async def read_secret(self, key: Key) -> SecretData | None:
        try:
            found = await self._api.get(item("v1", "secrets", key.namespace, key.name))
        except ApiError as error:
            if error.status == 404:
                return None
            raise
        return {name: _decoded(value) for name, value in (found.get("data") or {}).items()}

    async def read_config_map(self, key: Key) -> Mapping[str, str] | None:
        try:
            found = await self._api.get(item("v1", "configmaps", key.namespace, key.name))
        except ApiError as error:
            if error.status == 404:
                return None
            raise
        return dict(found.get("data") or {})

    async def read_token(self, pipeline: Pipeline) -> str | None:
        data = await self.read_secret(Key(pipeline.key.namespace, _owner(pipeline).token_secret))
        if data is None or TOKEN_KEY not in data:
            self._tokenless.add(pipeline.key)
            return None
        self._tokenless.discard(pipeline.key)
        return data[TOKEN_KEY]

    async def read_trust(self, pipeline: Pipeline) -> CoordinatorTrust | None:
        owner = _owner(pipeline)
        key = Key(pipeline.key.namespace, owner.tls_secret)
        data = await self.read_secret(key)
        if data is None:
            self._certified.discard(pipeline.key)
            return None
        self._certified.add(pipeline.key)
        certificate = data.get(CERTIFICATE_KEY, "")
        return CoordinatorTrust(coordinator_host(owner), certificate, f"Secret {key}", end_of(certificate))

    async def read_namespace_labels(self, namespace: str) -> Mapping[str, str]:
        try:
            found = await self._api.get(f"/api/v1/namespaces/{namespace}")
        except ApiError as error:
            if error.status == 404:
                return {}
            raise
        return dict(found["metadata"].get("labels") or {})

    # --- what shall be ---

    async def apply_pipeline(self, manifest: Manifest) -> None:
        await self._api.apply(manifest)

    async def apply_workers(self, workers: DesiredWorkers) -> None:
        """The Service first, so that the ranks' names resolve when they start; token and certificate before the pods."""
        assert workers.pipeline.spec is not None
        owner, settings = _owner(workers.pipeline), self._settings
        group = statefulset(
            owner,
            workers.pipeline.spec,
            workers.replicas,
            settings.worker,
            settings.log.format,
            allow_file_uris=settings.allow_file_uris,
            tls=settings.coordinators_encrypt,
        )
        present = self._versions(Key(owner.namespace, owner.child))
        if "StatefulSet" not in present or workers.pipeline.key in self._tokenless:
            await self._create_once(token_secret(owner, self._new_token()))
        if settings.coordinators_encrypt and workers.pipeline.key not in self._certified:
            await self._create_once(tls_secret(owner, self._new_certificate(coordinator_host(owner))))
            self._certified.add(workers.pipeline.key)
        if settings.network_policy.enabled:
            await self._apply_policy(
                network_policy(owner, workers.pipeline.spec, settings.network_policy, settings.namespace)
            )
        await self._apply_changed(service(owner, tls=settings.coordinators_encrypt), present.get("Service"))
        try:
            await self._apply_changed(group, present.get("StatefulSet"))
        except ApiError as error:
            if error.status in REFUSALS:
                raise WriteRefused(str(error)) from error
            raise

    async def delete_pod(self, pod: Pod) -> None:
        path = item("v1", "pods", pod.key.namespace, pod.key.name)
        logger.info(
            "deleting pod %s, so that its group restarts", pod.key, extra={"namespace": pod.key.namespace}
        )
        with _gone_when((404, 409)):
            await self._api.delete(path, pod.uid)

    async def delete_pipeline(self, pipeline_: Pipeline) -> None:
        path = item(API_VERSION, pipeline.PLURAL, pipeline_.key.namespace, pipeline_.key.name)
        logger.info(
            "deleting replica %s: it is no longer needed",
            pipeline_.key,
            extra=about_pipeline(pipeline_),
        )
        with _gone_when((404, 409)):
            await self._api.delete(path, pipeline_.uid)

    async def delete_task(self, task_: Task) -> None:
        path = item(API_VERSION, task.PLURAL, task_.key.namespace, task_.key.name)
        logger.info(
            "deleting task %s: its ttlSecondsAfterFinished has expired", task_.key, extra=about_task(task_)
        )
        with _gone_when((404, 409)):
            await self._api.delete(path, task_.uid)

    async def patch_task_status(self, task_: Task, patch: Manifest) -> None:
        await self._patch_status(task.PLURAL, task_, patch)

    async def patch_pipeline_status(self, pipeline_: Pipeline, patch: Manifest) -> None:
        await self._patch_status(pipeline.PLURAL, pipeline_, patch)

    async def emit_event(self, event: Event) -> None:
        if event.reason in UNTOLD and event.type == "Normal":
            return
        now = datetime.now(UTC)
        identity = f"{event.uid}{event.reason}{event.message}{now.isoformat()}"
        name = f"{event.about.name[:200].rstrip('-.')}.{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
        manifest: JSON = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"namespace": event.about.namespace, "name": name},
            "involvedObject": {
                "apiVersion": API_VERSION,
                "kind": event.kind,
                "namespace": event.about.namespace,
                "name": event.about.name,
                "uid": event.uid,
            },
            "type": event.type,
            "reason": event.reason,
            "message": event.message[:EVENT_MESSAGE_LIMIT],
            "source": {"component": FIELD_MANAGER},
            "firstTimestamp": timestamp(now),
            "lastTimestamp": timestamp(now),
            "count": 1,
        }
        await self._api.create(manifest)

    # --- the watch's blind spot ---

    async def audit(self) -> bool:
        """Ask which objects are really there; True when some were not.

        A watch that was cut off for long lists everything anew, and what was deleted in between stays in the
        indexes. Without this, a task deleted in such a gap would be trained to its end.
        """
        self._policies.clear()  # one that somebody changed or deleted comes back
        known = {
            plural: _uids(index) for index, _, plural, _ in self._kinds()
        }  # what comes later is not judged
        there = await self._there()
        vanished = {uid for plural, uids in known.items() for uid in uids - there[plural]}
        found_new = bool(vanished - self._vanished)
        self._vanished = vanished
        return found_new

    async def catch_up(self) -> None:
        """Return once all that the API server lists has come through the watches."""
        while True:
            there = await self._there()
            for _ in range(LOOKS):
                if all(there[plural] <= _uids(index) for index, _, plural, _ in self._kinds()):
                    return
                await asyncio.sleep(LOOK_EVERY)
            # Something is gone again, and will never come.

    async def _there(self) -> Mapping[str, set[str]]:
        """The uids that the API server lists, by kind."""
        there: dict[str, set[str]] = {}
        for _, api_version, plural, labels in self._kinds():
            there[plural] = set()
            for namespace in self._settings.namespaces or (None,):
                there[plural] |= await self._api.list_identities(api_version, plural, namespace, labels)
        return there

    def _kinds(self) -> tuple[tuple[Callable[[], Iterable[Raw]], str, str, str], ...]:
        """View, API version, plural and labels of what a decision is about."""
        return (
            (self._indexes.tasks, API_VERSION, task.PLURAL, ""),
            (self._indexes.pipelines, API_VERSION, pipeline.PLURAL, ""),
            (self._indexes.statefulsets, "apps/v1", "statefulsets", OURS),
            (self._indexes.pods, "v1", "pods", OURS),
        )

    def _present(self, raws: Iterable[Raw]) -> Iterator[Raw]:
        return (raw for raw in raws if raw["metadata"]["uid"] not in self._vanished)

    def _versions(self, key: Key) -> dict[str, str]:
        """What moves when someone changes a child's spec: the generation, or a Service's resourceVersion."""
        versions = {}
        for raw in self._indexes.statefulsets():
            if _is(raw, key):
                versions["StatefulSet"] = str(raw["metadata"].get("generation", ""))
        for raw in self._indexes.services():
            if _is(raw, key):
                versions["Service"] = str(raw["metadata"].get("resourceVersion", ""))
        return versions

    async def _apply_changed(self, manifest: JSON, version: str | None) -> None:
        """Apply unless it was applied just so and nobody has touched it since."""
        key = manifest["kind"], Key(manifest["metadata"]["namespace"], manifest["metadata"]["name"])
        if version is not None and self._applied.get(key) == (manifest, version):
            return
        answer = await self._api.apply(manifest)
        meta = answer["metadata"]
        self._applied[key] = manifest, str(meta.get("generation") or meta.get("resourceVersion", ""))

    async def _apply_policy(self, manifest: JSON) -> None:
        key = Key(manifest["metadata"]["namespace"], manifest["metadata"]["name"])
        if self._policies.get(key) != manifest:
            await self._api.apply(manifest)
            self._policies[key] = manifest

    async def _create_once(self, manifest: JSON) -> None:
        try:
            await self._api.create(manifest)
        except ApiError as error:
            if error.status != 409:
                raise

    async def _patch_status(self, plural: str, about: Task | Pipeline, patch: Manifest) -> None:
        """The server refuses (409) when another object of the same name stands there now, and when somebody wrote since
        the decision: a write that was late must not take back what a later one says.
        """
        meta = {"uid": about.uid, **({"resourceVersion": about.version} if about.version else {})}
        path = item(API_VERSION, plural, about.key.namespace, about.key.name)
        try:
            await self._api.merge_status(path, {"metadata": meta, "status": patch})
        except ApiError as error:
            if error.status == 404 or (error.status == 409 and await self._is_another(path, about.uid)):
                raise Gone(str(error)) from error
            raise

    async def _is_another(self, path: str, uid: str) -> bool:
        """Whether the object of this path is no longer the one with ``uid``."""
        with _gone_when((404,)):
            return bool((await self._api.get(path))["metadata"]["uid"] != uid)


def _owner(pipeline: Pipeline) -> Owner:
    return Owner(pipeline.key.namespace, pipeline.key.name, pipeline.uid)


def _is(raw: Raw, key: Key) -> bool:
    return key_of(raw) == key


@contextlib.contextmanager
def _gone_when(statuses: tuple[int, ...]) -> Iterator[None]:
    try:
        yield
    except ApiError as error:
        if error.status in statuses:
            raise Gone(str(error)) from error
        raise


def _decoded(value: Any) -> str:
    """Text of a Secret's value; what is not text can be no key and reads as empty."""
    try:
        return base64.b64decode(value).decode()
    except ValueError:
        return ""


def _uids(index: Callable[[], Iterable[Raw]]) -> set[str]:
    return {raw["metadata"]["uid"] for raw in index()}
