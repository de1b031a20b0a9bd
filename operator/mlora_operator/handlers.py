"""The edge to kopf: its watches fill what the one reconcile loop reads, and wake it.

Nothing here decides anything. There are no create, update or delete handlers, no timers and no daemons: each would make
kopf write to every object. Measured: an event handler causes no patch. Why there is no index of kopf's:
``reconcile/cluster/store.py``.
"""

# mypy: disable-error-code="untyped-decorator"
# kopf is not followed by mypy (pyproject.toml), so its decorators have no type here.
from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any

import kopf
from kubernetes.aio import client, config

from mlora_operator.api import GROUP, VERSION, pipeline, task
from mlora_operator.certificates import self_signed
from mlora_operator.coordinator import Links
from mlora_operator.health import FailureStreak, examine, running_tasks, serve_health
from mlora_operator.leader_election.elector import Elector, LeaseTimes, suspend_clock
from mlora_operator.leader_election.lease import ApiLeases, own_identity
from mlora_operator.metrics.exporter import Exporter
from mlora_operator.metrics.server import serve_metrics
from mlora_operator.page.board import Board
from mlora_operator.page.server import LOOPBACK, PageServer
from mlora_operator.page.service import PageService
from mlora_operator.reconcile.cluster.api_server import OURS, ApiServerCluster, Indexes
from mlora_operator.reconcile.cluster.rest_client import KubeApi
from mlora_operator.reconcile.cluster.store import WatchedObjects
from mlora_operator.reconcile.cluster.throttle import API_SERVER
from mlora_operator.reconcile.loop import Loop, utc_now
from mlora_operator.settings import Settings

logger = logging.getLogger(__name__)

AUDIT_EVERY = 300.0  # seconds
LIST_AGAIN_AFTER = 1.0
WATCHED = (task.PLURAL, pipeline.PLURAL, "statefulsets", "services", "pods", "events")
KINDS = (
    (GROUP, VERSION, task.PLURAL),
    (GROUP, VERSION, pipeline.PLURAL),
    ("apps", "v1", "statefulsets"),
    ("", "v1", "services"),
    ("", "v1", "pods"),
    ("", "v1", "events"),
)


class Runtime:
    """What lives from startup to cleanup. Given to kopf as its memo."""

    def __init__(self, settings: Settings, now: Callable[[], datetime] = utc_now) -> None:
        self.now = now
        self.settings = settings
        self.watched = WatchedObjects(WATCHED)
        self.indexed = asyncio.Event()  # all that was there at the start has come through the watches
        self.loop: Loop | None = None  # while this replica leads
        self.elector: Elector | None = None
        self.work: asyncio.Task[None] | None = None
        self.board = Board()  # what the page shows
        self.exporter = Exporter(
            settings.metrics,
            leads=lambda: self.elector is not None and self.elector.leads,
            watching=self.indexed.is_set,
            now=utc_now,
        )

    def __copy__(self) -> Runtime:
        """kopf copies its memo for each object: there is only one runtime, whose loop comes and goes with its terms."""
        return self

    def saw(self, plural: str, event: str | None, body: Mapping[str, Any]) -> None:
        """There is something new to see."""
        self.watched.saw(plural, event, body)
        self.wake_loop()

    async def start(self) -> None:
        indexes = Indexes(*map(self.watched.of, WATCHED))
        if not self.settings.coordinators_encrypt:
            logger.warning(
                "credentials of tasks are sent to the coordinators in clear text: set coordinatorTls to true"
            )
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.work = asyncio.create_task(self._serve(indexes, ready), name="reconcile loop")
        await ready

    async def stop(self) -> None:
        if self.work is not None:
            self.work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self.work

    async def _serve(self, indexes: Indexes, ready: asyncio.Future[None]) -> None:
        """Open everything, say so, and work until cancelled, whenever this replica leads. Nothing is decided on
        half-filled indexes.
        """
        async with contextlib.AsyncExitStack() as stack:
            try:
                api = await stack.enter_async_context(client.ApiClient(await _credentials()))
                elector = self._elector(KubeApi(api, tally=self.exporter.measures.request))
                new_token = functools.partial(secrets.token_urlsafe, 32)
                counted = KubeApi(api, elector.permit, self.exporter.measures.request)
                cluster = ApiServerCluster(
                    counted, indexes, self.settings, new_token, lambda host: self_signed(host, self.now())
                )
                runner = await serve_health(self.settings.health.port, self._check)
                stack.push_async_callback(runner.cleanup)
                if self.settings.metrics.enabled:
                    runner = await serve_metrics(self.settings.metrics.port, self.exporter.registry)
                    stack.push_async_callback(runner.cleanup)
                if self.settings.page.enabled:
                    page = PageServer(
                        PageService(self.board, self._leader, utc_now),
                        None,
                        self.settings.page.port,
                        hosts=LOOPBACK | {name.lower() for name in self.settings.page.hosts},
                    )
                    page.start()
                    stack.push_async_callback(asyncio.to_thread, page.stop)
            except BaseException as error:
                ready.set_exception(error)
                raise
            ready.set_result(None)
            await self._catch_up(cluster)
            self.indexed.set()
            self.elector = elector
            async with asyncio.TaskGroup() as group:
                group.create_task(self._audit(cluster), name="audit")
                group.create_task(elector.run(lambda: self._lead(cluster, elector)), name="leader election")

    def _elector(self, api: KubeApi) -> Elector:
        wanted = self.settings.leader_election
        store = ApiLeases(api, self.settings.namespace, wanted.lease_name, self.now)
        terms = LeaseTimes(
            wanted.lease_seconds, wanted.deadline_seconds, renew_every=min(2.0, wanted.deadline_seconds / 3)
        )
        return Elector(store, own_identity(os.environ), terms, suspend_clock)

    def _leader(self) -> str:
        """Who leads instead of this replica; empty where it leads itself, or nobody knows."""
        holder = self.elector.holder if self.elector is not None else ""
        return holder if self.elector is not None and holder != self.elector.me else ""

    async def _lead(self, cluster: ApiServerCluster, elector: Elector) -> None:
        """One term. What it learns ends with it: another may have written since."""
        await self._compare(cluster)  # while it followed, a cut watch may have left objects that are gone
        async with Links(self.wake_loop, self.now, elector.permit) as links:
            shown = (self.board.watcher(links),) if self.settings.page.enabled else ()
            self.loop = Loop(
                cluster,
                links,
                self.settings,
                now=self.now,
                watchers=(self.exporter.watch, *shown),
                witness=self.exporter.measures,
                pace=API_SERVER,
            )
            try:
                await self.loop.run()
            finally:
                self.loop = None
                self.board.clear()
                self.exporter.end_of_term()

    def wake_loop(self) -> None:
        if self.loop is not None:
            self.loop.wake()

    def _check(self) -> Any:
        """With a replica that leads passes succeed, one that follows looks at the lease; both have all watches."""
        silence = failures = None
        if self.loop is not None:
            now, failing = time.monotonic(), self.loop.failing
            silence = now - self.loop.last_pass
            if failing is not None:
                failures = FailureStreak(now - failing.since, failing.times, failing.words)
        elif self.elector is not None:
            silence = self.elector.silence
        return examine(silence, self.settings.health.max_silence_seconds, WATCHED, running_tasks(), failures)

    async def _catch_up(self, cluster: ApiServerCluster) -> None:
        """Until what the API server lists has come through the watches: kopf does not say when its first lists are over."""
        while True:
            try:
                return await cluster.catch_up()
            except Exception as error:
                logger.warning("cannot list the existing objects: %s", error)
            await asyncio.sleep(LIST_AGAIN_AFTER)

    async def _audit(self, cluster: ApiServerCluster) -> None:
        while True:
            await asyncio.sleep(AUDIT_EVERY)
            await self._compare(cluster)

    async def _compare(self, cluster: ApiServerCluster) -> None:
        try:
            if await cluster.audit():
                logger.warning("objects were deleted while the watch was interrupted")
                self.wake_loop()
        except Exception as error:
            logger.warning("the audit of the indexes failed: %s", error)


class Backoffs:
    """Seconds between tries to list and to watch, without an end. With kopf's own, a watch comes back up to 21 seconds
    after the server does, or, when the server has answered 500 for long, never."""

    def __iter__(self) -> Iterator[float]:
        return itertools.chain((0.2, 0.5, 1.0), itertools.repeat(2.0))


class NoEssence(kopf.DiffBaseStorage):  # type: ignore[misc]
    """Of no object does kopf work out what has changed: that is for handlers of changes, and there are none. Its own way
    copies each object that a watch brings, three times.
    """

    def build(self, **_: Any) -> dict[str, Any]:
        return {}

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None: ...


def kopf_settings() -> kopf.OperatorSettings:
    """kopf without anything that writes, and with the API server filtering what is watched."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.persistence.diffbase_storage = NoEssence()
    settings.scanning.disabled = True  # no watch on CRDs and namespaces; a missing CRD shows in the probe
    settings.peering.standalone = True
    settings.process.ultimate_exiting_timeout = 20
    settings.networking.error_backoffs = Backoffs()
    settings.networking.connect_timeout = 10
    for group, version, plural in KINDS:
        if plural in ("statefulsets", "services", "pods"):
            settings.watching.label_selectors[group, version, plural] = OURS
    settings.watching.field_selectors["", "v1", "events"] = (
        "involvedObject.kind=StatefulSet,reason=FailedCreate"
    )
    return settings


async def _credentials() -> client.Configuration:
    configuration = client.Configuration()
    # Else the file .netrc is looked for at each request, in another thread.
    configuration.client_session_kwargs = {"trust_env": False}
    try:
        config.load_incluster_config(client_configuration=configuration)
    except config.ConfigException:
        await config.load_kube_config(client_configuration=configuration)
    return configuration


@kopf.on.event(GROUP, VERSION, task.PLURAL)
@kopf.on.event(GROUP, VERSION, pipeline.PLURAL)
@kopf.on.event("apps", "v1", "statefulsets")
@kopf.on.event("", "v1", "services")
@kopf.on.event("", "v1", "pods")
@kopf.on.event("", "v1", "events")
async def saw(memo: kopf.Memo, resource: kopf.Resource, type: str | None, body: kopf.Body, **_: Any) -> None:
    runtime(memo).saw(resource.plural, type, body)


@kopf.on.startup(errors=kopf.ErrorsMode.PERMANENT)  # a restart by the kubelet beats a minute of waiting
async def start(memo: kopf.Memo, **_: Any) -> None:
    await runtime(memo).start()


@kopf.on.cleanup()
async def stop(memo: kopf.Memo, **_: Any) -> None:
    await runtime(memo).stop()


def runtime(memo: Any) -> Runtime:
    assert isinstance(memo, Runtime)
    return memo
