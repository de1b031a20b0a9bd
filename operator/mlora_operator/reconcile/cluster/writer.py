"""From a decision to writes: only what differs, each by itself, so that one failure holds nothing else up.

A status counts as written from the moment its write begins (``written``), so that passes that come meanwhile neither decide
anew nor tell the same event twice; when it fails, that is taken back. Only the end of a task does not count before the API
server has it: from then on the coordinator may forget the task, and a crash in between would train it again.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial

from mlora_operator.api.pipeline_status import PipelineStatus
from mlora_operator.api.task import TaskStatus
from mlora_operator.reconcile.cluster.assumed import AssumedStatuses
from mlora_operator.reconcile.cluster.config_map_texts import TextGone, no_text
from mlora_operator.reconcile.cluster.plan_throttle import ASK_AGAIN, PlanThrottle
from mlora_operator.reconcile.cluster.throttle import NOTHING, PROMPT, Pace, difference, pause
from mlora_operator.reconcile.cluster.write_queue import QueuedWrite, WriteQueue, in_turn
from mlora_operator.reconcile.observer import NoObserver, Observer
from mlora_operator.reconcile.ports import Cluster, Coordinators, Gone, ReadText, WriteRefused
from mlora_operator.reconcile.state.decision import Decision, DesiredWorkers, Event, Manifest
from mlora_operator.reconcile.state.decode import time_or
from mlora_operator.reconcile.state.log_fields import Fields, about_key, about_pipeline, about_task
from mlora_operator.reconcile.state.snapshot import Key, Pipeline, Snapshot, Task, has_ended
from mlora_worker.protocol import Plan

logger = logging.getLogger(__name__)
AT_ONCE = 16  # requests to the API server under way that somebody waits for
PATIENT_AT_ONCE = 4  # others: of tasks that were told of before, and events
_LONG_AGO = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class _Refusal:
    words: str
    generation: int  # of the pipeline's spec
    at: datetime


def _of_one(key: Key, work: Callable[[], Manifest]) -> Manifest:
    """What to write of one object; nothing where that cannot be worked out, which holds up no other object."""
    try:
        return work()
    except Exception:
        logger.exception("what of the status of %s has changed cannot be worked out", key)
        return {}


class Writer:
    """Carries decisions out. Its memory of own writes is a cache (see ``written``). ``look_again``: see ``WriteQueue``.
    ``read_text``: of ConfigMaps, by digest."""

    def __init__(
        self,
        cluster: Cluster,
        coordinators: Coordinators,
        witness: Observer | None = None,
        pace: Pace = PROMPT,
        look_again: Callable[[bool], None] = lambda _: None,
        read_text: ReadText = no_text,
    ) -> None:
        self._read_text = read_text
        self._cluster = cluster
        self._pace = pace
        self._coordinators = coordinators
        self._witness = witness or NoObserver()
        self._deliveries = WriteQueue(AT_ONCE, PATIENT_AT_ONCE, look_again)
        self.tasks: AssumedStatuses[TaskStatus] = AssumedStatuses()
        self.pipelines: AssumedStatuses[PipelineStatus] = AssumedStatuses()
        self._refusals: dict[str, _Refusal] = {}  # by pipeline's uid
        self._plans = PlanThrottle(pace)
        # After the last ``begin``: when the first of what waits is due.
        self.held_back: timedelta | None = None

    async def act(self, snapshot: Snapshot, decision: Decision, now: datetime) -> bool:
        """Carry ``decision`` out, to the end. False when a write failed."""
        self.begin(snapshot, decision, now)
        return await self._deliveries.settled()

    def begin(self, snapshot: Snapshot, decision: Decision, now: datetime) -> None:
        """Begin to carry ``decision`` out, instead of what is left of the ones before."""
        self.held_back = None
        self._plans.forget_past(now)
        deeds = self._deeds(snapshot, decision, now)
        self._deliveries.offer((*deeds, *self._statuses(snapshot, decision, now)))

    @property
    def refused(self) -> Mapping[str, str]:
        """By pipeline's uid: why the API server takes no such workers."""
        return {uid: refusal.words for uid, refusal in self._refusals.items()}

    def recently_written(self, now: datetime) -> frozenset[str]:
        """The uids of tasks whose status was written so lately that words alone are not written again."""
        return self.tasks.lately(now, self._pace.words) if self._pace.words else frozenset()

    def keep_only(self, uids: set[str]) -> None:
        """Forget what is about any other object."""
        self.tasks.keep_only(uids)
        self.pipelines.keep_only(uids)
        self._refusals = {uid: one for uid, one in self._refusals.items() if uid in uids}

    async def close(self) -> None:
        """Break off what is under way."""
        await self._deliveries.close()

    def _deeds(self, snapshot: Snapshot, decision: Decision, now: datetime) -> Iterator[QueuedWrite]:
        """All but statuses."""
        cluster = self._cluster
        for made in decision.new_pipelines:
            name = str(made["metadata"]["name"])
            yield self._deed(
                ("make", made["metadata"]["namespace"], name),
                "make a pipeline",
                partial(cluster.apply_pipeline, made),
            )
        for key, group in decision.workers.items():
            if not self._is_still_refused(group, now):
                yield self._deed(
                    ("workers", key),
                    f"apply the workers of {key}",
                    partial(self._apply_workers, group, now),
                    about_pipeline(group.pipeline),
                )
        for one in decision.delete_pipelines:
            yield self._deed(
                ("delete", one.uid),
                f"delete replica {one.key}",
                partial(cluster.delete_pipeline, one),
                about_pipeline(one),
            )
        for pod in decision.delete_pods:
            yield self._deed(("delete", pod.uid), f"delete pod {pod.key}", partial(cluster.delete_pod, pod))
        for task in decision.delete_tasks:
            yield self._deed(
                ("delete", task.uid),
                f"delete task {task.key}",
                partial(cluster.delete_task, task),
                about_task(task),
                gone=partial(self.tasks.gone, task.uid),
            )
        for key, plan in decision.plans.items():
            contact = snapshot.contacts.get(key)
            run = contact.report.run_id if contact is not None and contact.report is not None else None
            if left := self._plans.wait(key, plan, decision.plan_sizes.get(key, 0), run, now):
                self._hold_back(left)
                continue
            send = partial(self._send_plan, key, plan, run, now)
            # A coordinator that takes no plan, because it is frozen, holds up nothing but its own plans.
            yield self._deed(("plan", key), f"send the plan to {key}", send, about_key(key), has_lane=True)

        for key, digests in decision.texts.items():
            send_texts = partial(self._send_texts, key, digests)
            what = f"send texts of ConfigMaps to {key}"
            yield self._deed(("texts", key), what, send_texts, about_key(key), has_lane=True)

    async def _send_texts(self, key: Key, digests: Sequence[str]) -> None:
        """One that is gone does not hold up the others: the next plan names what its ConfigMap holds now."""
        for digest in digests:
            try:
                text = await self._read_text(digest)
            except TextGone as error:
                logger.warning("a text for %s cannot be sent: %s", key, error, extra=about_key(key))
                continue
            await self._coordinators.send_text(key, digest, text)

    async def _send_plan(self, key: Key, plan: Plan, run: str | None, now: datetime) -> None:
        try:
            await self._coordinators.send_plan(key, plan, self._read_text)
        except WriteRefused:
            self._plans.refused(key, plan, run, now)
            raise

    def _hold_back(self, left: timedelta) -> None:
        self.held_back = left if self.held_back is None else min(self.held_back, left)

    async def _apply_workers(self, group: DesiredWorkers, now: datetime) -> None:
        try:
            await self._cluster.apply_workers(group)
        except WriteRefused as error:
            self._refusals[group.pipeline.uid] = _Refusal(str(error), group.pipeline.generation, now)
            raise
        self._refusals.pop(group.pipeline.uid, None)

    def _is_still_refused(self, group: DesiredWorkers, now: datetime) -> bool:
        """The same was refused a moment ago: a crowd of passes asks once."""
        known = self._refusals.get(group.pipeline.uid)
        same = known is not None and known.generation == group.pipeline.generation
        return known is not None and same and NOTHING <= now - known.at < ASK_AGAIN

    def _deed(
        self,
        about: Hashable,
        what: str,
        write: Callable[[], Awaitable[None]],
        fields: Fields | None = None,
        gone: Callable[[], None] | None = None,
        *,
        has_lane: bool = False,
    ) -> QueuedWrite:
        return QueuedWrite(about, partial(self._try, what, write, fields, gone), has_lane)

    def _statuses(self, snapshot: Snapshot, decision: Decision, now: datetime) -> list[QueuedWrite]:
        """Of each namespace in turn, so that a crowd in one keeps nobody waiting in another. Within one, those of
        pipelines, which are few; then of tasks: who has heard nothing yet, then who has heard nothing for longest, so
        that a thousand tasks that move keep nobody waiting who has just come.
        """
        stories: defaultdict[tuple[str, Key], list[Event]] = defaultdict(list)
        for event in decision.events:
            stories[event.kind, event.about].append(event)
        due: list[tuple[str, QueuedWrite]] = []  # by namespace
        for one in snapshot.pipelines:
            wished = decision.pipeline_statuses.get(one.key)
            if wished is None:
                continue
            patch = _of_one(one.key, partial(self._due_of_pipeline, one, wished, now))
            if patch:
                story = stories["LoRAPipeline", one.key]
                write = partial(self._write_pipeline, one, wished, patch, story, now)
                due.append((one.key.namespace, QueuedWrite(one.uid, write)))
        tasks = [
            (task, status, patch)
            for task in snapshot.tasks
            if (status := decision.task_statuses.get(task.key)) is not None
            and (patch := _of_one(task.key, partial(self._due_of_task, task, status, now)))
        ]
        tasks.sort(
            key=lambda due: (bool(due[0].status.conditions), self.tasks.last_write(due[0].uid) or _LONG_AGO)
        )
        for task, status, patch in tasks:
            story = stories["LoRATask", task.key]
            write = partial(self._write_task, task, status, patch, story, now)
            due.append(
                (task.key.namespace, QueuedWrite(task.uid, write, patient=bool(task.status.conditions)))
            )
        return in_turn(due)

    def _due_of_task(self, task: Task, status: TaskStatus, now: datetime) -> Manifest:
        """The patch to write now; empty when nothing has changed, or when it may wait."""
        if status is task.status or status == task.status:
            return {}
        patch = difference(task.status, status)
        begun = time_or(status.start_time, now)
        wait = pause(patch, task.status.conditions, status.conditions, now - begun, self._pace)
        return patch if self._is_due(self.tasks.last_write(task.uid), wait, now) else {}

    def _due_of_pipeline(self, pipeline: Pipeline, status: PipelineStatus, now: datetime) -> Manifest:
        if status == pipeline.status:
            return {}
        patch = difference(pipeline.status, status)
        wait = pause(patch, pipeline.status.conditions, status.conditions, NOTHING, self._pace)
        return patch if self._is_due(self.pipelines.last_write(pipeline.uid), wait, now) else {}

    def _is_due(self, last_write: datetime | None, wait: timedelta, now: datetime) -> bool:
        """A clock that was set back holds nothing up for longer than ``wait``."""
        if last_write is None or not NOTHING <= now - last_write < wait:
            return True
        self._hold_back(last_write + wait - now)
        return False

    async def _write_task(
        self, task: Task, status: TaskStatus, patch: Manifest, story: list[Event], now: datetime
    ) -> bool:
        fields = about_task(task, status.pipeline)
        with self.tasks.writing(task, status, now, counts_at_once=not has_ended(status)) as write:
            done = await self._try(
                f"write the status of task {task.key}",
                partial(self._cluster.patch_task_status, task, patch),
                fields,
                gone=partial(self.tasks.gone, task.uid),
            )
            if done:
                write.done()
        if done:
            if not self.tasks.is_gone(task.uid):
                self._bear_witness(lambda: self._witness.task_written(task, status, now))
            self._tell(story, fields)
        return done

    async def _write_pipeline(
        self,
        pipeline: Pipeline,
        status: PipelineStatus,
        patch: Manifest,
        story: list[Event],
        now: datetime,
    ) -> bool:
        fields = about_pipeline(pipeline)
        with self.pipelines.writing(pipeline, status, now) as write:
            done = await self._try(
                f"write the status of pipeline {pipeline.key}",
                partial(self._cluster.patch_pipeline_status, pipeline, patch),
                fields,
                gone=partial(self.pipelines.gone, pipeline.uid),
            )
            if done:
                write.done()
        if done:
            if not self.pipelines.is_gone(pipeline.uid):
                self._bear_witness(lambda: self._witness.pipeline_written(pipeline, status))
            self._tell(story, fields)
        return done

    def _bear_witness(self, tell: Callable[[], None]) -> None:
        try:
            tell()
        except Exception:  # who only counts must not stop the work
            logger.exception("what was written could not be counted")

    def _tell(self, story: list[Event], about: Fields) -> None:
        """Log it now, and emit its events when the API server has time for them."""
        for event in story:
            level = logging.INFO if event.type == "Normal" else logging.WARNING
            logger.log(
                level, "%s %s: %s: %s", event.kind, event.about, event.reason, event.message, extra=about
            )
        if story:
            self._deliveries.add(QueuedWrite(object(), partial(self._emit, story, about), patient=True))

    async def _emit(self, story: list[Event], about: Fields) -> bool:
        for event in story:
            await self._try(
                f"tell an event of {event.about}", partial(self._cluster.emit_event, event), about
            )
        return True  # an event that could not be told is not told again

    async def _try(
        self,
        what: str,
        write: Callable[[], Awaitable[None]],
        about: Fields | None = None,
        gone: Callable[[], None] | None = None,
    ) -> bool:
        """One write. What is gone needs no write; any other failure is logged and tried again by a later pass."""
        try:
            await write()
        except Gone:
            if gone is not None:
                gone()
        except Exception as error:
            logger.warning("could not %s: %s", what, error, extra=about)
            logger.debug("could not %s", what, exc_info=error, extra=about)
            self._witness.write_failed()
            return False
        return True
