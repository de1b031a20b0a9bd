"""The one reconcile loop: woken by events and reports, level-triggered, with and without a cluster."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from pydantic import ValidationError

from mlora_operator.api.problem import describe
from mlora_operator.reconcile.admission.deleted_tasks import DeletedTasks
from mlora_operator.reconcile.cache import Memo
from mlora_operator.reconcile.cluster.assumed import up_to_date_pipeline, up_to_date_task
from mlora_operator.reconcile.cluster.cached_reads import CachedReads
from mlora_operator.reconcile.cluster.throttle import PROMPT, Pace
from mlora_operator.reconcile.cluster.writer import Writer
from mlora_operator.reconcile.decide import decide
from mlora_operator.reconcile.failed_passes import FailedPasses, failed_again
from mlora_operator.reconcile.observer import NoObserver, Observer
from mlora_operator.reconcile.ports import Cluster, Coordinators, CoordinatorTrust, Endpoint
from mlora_operator.reconcile.state.decision import Decision, DecisionFault
from mlora_operator.reconcile.state.decode import (
    Reader,
    config_maps_wanted,
    namespaces_wanted,
    secrets_wanted,
)
from mlora_operator.reconcile.state.log_fields import about_key
from mlora_operator.reconcile.state.snapshot import CertificateEnd, Key, Pipeline, Snapshot
from mlora_operator.settings import Settings

logger = logging.getLogger(__name__)

DEBOUNCE = 0.1  # seconds: wakes that come together are one pass
# To decide about a crowd of tasks takes a while. Between two decisions the processor is for the watches and the writes:
# for so many times as long as the last one took, and at most so many seconds.
CALM, CALM_MOST = 8.0, 1.0
RESYNC = 5.0  # seconds: passes without a wake, for what only time or an unwatched Secret changes
CLOCK_JUMP = 10.0  # seconds by which the clock may go wrong from one pass to the next before that is a jump
RETRY = 1.0  # seconds after a pass in which something failed

Watcher = Callable[[Snapshot, Decision], None]  # is told what a pass saw and decided; quick, and does no I/O


def utc_now() -> datetime:
    return datetime.now(UTC)


class Loop:
    """``run`` until cancelled. ``wake`` may be called at any time from the loop's thread."""

    def __init__(
        self,
        cluster: Cluster,
        coordinators: Coordinators,
        settings: Settings,
        *,
        now: Callable[[], datetime] = utc_now,
        monotonic: Callable[[], float] = time.monotonic,
        watchers: Sequence[Watcher] = (),
        witness: Observer | None = None,
        pace: Pace = PROMPT,
    ) -> None:
        self._cluster = cluster
        self._coordinators = coordinators
        self._settings = settings
        self._now = now
        self._monotonic = monotonic
        self._watchers = watchers
        self._witness = witness or NoObserver()
        self._woken = asyncio.Event()
        self._reader = Reader(allow_file_uris=settings.allow_file_uris)
        self._unread: tuple[DecisionFault, ...] = ()  # in the present pass
        self._lookups = CachedReads(cluster, monotonic)
        self._memo = Memo()
        self._deleted = DeletedTasks()
        self._writer = Writer(
            cluster, coordinators, self._witness, pace, self._look_again, self._lookups.texts.text
        )
        self._clocks: tuple[datetime, float] | None = None  # both, when the last pass began
        self._deciding = 0.0  # seconds of the last decision, and of what it began
        self._told: frozenset[tuple[str, Key, str]] = (
            frozenset()
        )  # of what is isolated: said in the log already
        self.last_pass = monotonic()  # when a pass last came to its end, well or not
        self.failing: FailedPasses | None = None  # while passes fail

    def wake(self) -> None:
        self._woken.set()

    async def run(self) -> None:
        try:
            while True:
                await self._run_once()
        finally:
            await self._writer.close()

    async def _run_once(self) -> None:
        """A pass, and the time until the next is due. What it writes is still under way then."""
        try:
            found = await self._pass()
            begun = self._monotonic()
            self._writer.begin(*found)
            self._deciding += self._monotonic() - begun
            rest = self._rest()
            self.failing = None
        except Exception as error:
            logger.exception("a pass failed; the next one tries again")
            self._witness.pass_failed()
            self.failing = failed_again(self.failing, error, self._monotonic())
            rest = RETRY
        self._witness.failing(self.failing.times if self.failing is not None else 0)
        self.last_pass = self._monotonic()
        # Not wait_for: before Python 3.12 it swallows a cancellation that comes together with a wake.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(rest):
                await self._woken.wait()
        await asyncio.sleep(max(DEBOUNCE, min(CALM * self._deciding, CALM_MOST)))
        self._woken.clear()

    def _rest(self) -> float:
        """Seconds until a pass is needed though nothing is new."""
        held = self._writer.held_back
        return RESYNC if held is None else min(RESYNC, held.total_seconds())

    def _look_again(self, failed: bool) -> None:
        if failed:
            asyncio.get_running_loop().call_later(RETRY, self.wake)
        else:
            self.wake()

    async def step(self) -> bool:
        """One pass, with all its writes. False when one of them failed."""
        return await self._writer.act(*await self._pass())

    async def _pass(self) -> tuple[Snapshot, Decision, datetime]:
        """Observe and decide: what there was, what shall be, and when that was."""
        begun = self._monotonic()
        self._compare_clocks(begun)
        snapshot = await self._observe()
        observed = self._monotonic()
        now = self._now()
        decision = decide(snapshot, self._settings, now, self._memo)
        self._deciding = self._monotonic() - observed
        self._tell_faults((*self._unread, *decision.faults))
        if decision.unjudged:
            snapshot = replace(snapshot, unjudged=decision.unjudged)
        if decision.unjudged or snapshot.later:
            self.wake()
        for watcher in self._watchers:
            try:
                watcher(snapshot, decision)
            except Exception:  # who only watches must not stop the work
                logger.exception("a watcher of the passes failed")
        self._witness.passed(self._monotonic() - begun, self._deciding)
        return snapshot, decision, now

    def _tell_faults(self, faults: Sequence[DecisionFault]) -> None:
        """In the log once for as long as it lasts: the conditions say so all the time."""
        faults = tuple({(one.kind, one.uid): one for one in faults}.values())
        now = frozenset((one.kind, one.about, one.words) for one in faults)
        for one in faults:
            if (one.kind, one.about, one.words) not in self._told:
                logger.error(
                    "%s %s cannot be reconciled and is left unchanged: %s",
                    one.kind,
                    one.about,
                    one.words,
                    exc_info=one.error,
                    extra=about_key(one.about) if one.kind == "LoRAPipeline" else {"task": str(one.about)},
                )
        self._told = now
        kinds = Counter(one.kind for one in faults)
        self._witness.isolated(kinds["LoRATask"], kinds["LoRAPipeline"])

    def _compare_clocks(self, steady: float) -> None:
        """A clock is put right by hours where a machine has slept, or had started with a wrong one."""
        now, before = self._now(), self._clocks
        self._clocks = now, steady
        if before is None:
            return
        jump = (now - before[0]).total_seconds() - (steady - before[1])
        if abs(jump) > CLOCK_JUMP:
            logger.warning("the clock jumped by %.0f s", jump)
            self._coordinators.clock_jumped()

    async def _observe(self) -> Snapshot:
        objects = self._cluster.objects()
        written = self._writer
        tasks = tuple(
            up_to_date_task(task, written.tasks)
            for task in self._reader.tasks(objects.tasks)
            if not written.tasks.is_gone(task.uid)
        )
        pipelines = tuple(
            up_to_date_pipeline(pipeline, written.pipelines)
            for pipeline in self._reader.pipelines(objects.pipelines)
            if not written.pipelines.is_gone(pipeline.uid)
        )
        self._unread = self._reader.faults()
        self._forget({raw["metadata"]["uid"] for raw in (*objects.tasks, *objects.pipelines)})
        pipelines, revisions = self._revised(pipelines)
        valid = [pipeline for pipeline in pipelines if pipeline.spec is not None and not pipeline.deleting]
        with_workers = [
            one for one in valid if one.key in objects.groups and objects.groups[one.key].replicas
        ]
        trusts = await self._follow({one.key: (one, objects.groups[one.key].scheme) for one in with_workers})
        contacts = self._coordinators.contacts()
        return Snapshot(
            tasks=tasks,
            pipelines=pipelines,
            groups=objects.groups,
            revisions=revisions,
            worker_image=self._settings.worker.image,
            refused=written.refused,
            contacts=contacts,
            certificate_ends={
                key: CertificateEnd(trust.ends, trust.origin)
                for key, trust in trusts.items()
                if trust.ends is not None
            },
            secrets=await self._lookups.secrets(secrets_wanted(tasks, pipelines)),
            config_maps=await self._lookups.texts.of(config_maps_wanted(tasks, contacts)),
            namespace_labels=await self._lookups.namespace_labels(namespaces_wanted(tasks, pipelines)),
            unread=self._lookups.unread(),
            later=self._lookups.later(),
            texts_kept=self._lookups.texts.kept,
            recently_written=written.recently_written(self._now()),
            faulty={one.uid: one.error for one in self._unread},
            deleted=self._deleted.seen(tasks, (str(one.key) for one in pipelines), self._now()),
        )

    def _revised(self, pipelines: Iterable[Pipeline]) -> tuple[tuple[Pipeline, ...], dict[Key, str]]:
        """With the revisions that their workers shall have. What no workers can be made of, such as a variable without a
        name, which the API server does not look at, is a spec that is not understood: it stops nobody else's work.
        """
        read, revisions = [], {}
        for pipeline in pipelines:
            seen = pipeline
            if pipeline.spec is not None and not pipeline.deleting:
                try:
                    revisions[pipeline.key] = self._cluster.revision(pipeline)
                except Exception as error:
                    seen = replace(
                        pipeline,
                        spec=None,
                        problem=f"spec: no workers can be created from it: {_words(error)}",
                    )
            read.append(seen)
        return tuple(read), revisions

    async def _follow(self, schemes: Mapping[Key, tuple[Pipeline, str]]) -> Mapping[Key, CoordinatorTrust]:
        """Of each pipeline with workers, and how its coordinator is spoken to. Returns by what those that encrypt prove
        themselves."""
        urls = {key: self._cluster.coordinator_url(*one) for key, one in schemes.items()}
        tokens = await self._lookups.tokens(pipeline for pipeline, _ in schemes.values())
        encrypted = {key for key, url in urls.items() if url.startswith("https:")}
        trusts = await self._lookups.trusts(schemes[key][0] for key in encrypted)
        self._coordinators.follow(
            {
                key: Endpoint(url, tokens[key], trusts.get(key))
                for key, url in urls.items()
                if key in tokens and (key not in encrypted or key in trusts)
            }
        )
        return trusts

    def _forget(self, uids: set[str]) -> None:
        self._writer.keep_only(uids)
        self._reader.keep_only(uids)


def _words(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return describe(error)
    if isinstance(error, KeyError):
        return f"something in spec.worker has no {error}"
    return f"a value in spec.worker does not fit the fields of a pod ({type(error).__name__}: {error})"
