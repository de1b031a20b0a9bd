"""From a decision to writes: only what differs, each by itself, so that one failure holds nothing else up."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from functools import partial

from mlora_operator.api.pipeline import PipelineStatus
from mlora_operator.api.task import TaskStatus
from mlora_operator.reconcile.about import Fields, about_key, about_pipeline, about_task
from mlora_operator.reconcile.decision import Decision, Event, Manifest
from mlora_operator.reconcile.observe import time_or
from mlora_operator.reconcile.ports import Cluster, Coordinators, Gone
from mlora_operator.reconcile.snapshot import Key, Pipeline, Snapshot, Task
from mlora_operator.reconcile.statuses import NOTHING, PROMPT, Pace, difference, pause
from mlora_operator.reconcile.witness import Nobody, Witness
from mlora_operator.reconcile.written import Written

logger = logging.getLogger(__name__)
AT_ONCE = 16  # writes in flight
# Seconds of a pass in which statuses are begun to be written; what is left waits for the next. Who has heard nothing yet is
# never left, so that a thousand tasks that move keep nobody waiting who has just come.
WRITING = 0.5


_LONG_AGO = datetime.min.replace(tzinfo=UTC)


class Writer:
    """Carries decisions out. Its memory of own writes is a cache (see ``written``)."""

    def __init__(
        self,
        cluster: Cluster,
        coordinators: Coordinators,
        witness: Witness | None = None,
        pace: Pace = PROMPT,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster = cluster
        self._pace = pace
        self._monotonic = monotonic
        self._coordinators = coordinators
        self._witness = witness or Nobody()
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._turns = asyncio.Semaphore(
            AT_ONCE
        )  # of statuses of tasks, each of which may need several slots in turn
        self.tasks: Written[TaskStatus] = Written()
        self.pipelines: Written[PipelineStatus] = Written()
        self.held_back: timedelta | None = None  # after the last ``act``: when the first of what waits is due

    async def act(self, snapshot: Snapshot, decision: Decision, now: datetime) -> bool:
        """Carry ``decision`` out. False when a write failed and the loop should come back soon."""
        first = [
            *(
                self._try("make a pipeline", self._cluster.apply_pipeline(one))
                for one in decision.new_pipelines
            ),
            *(
                self._try(
                    f"apply the workers of {key}",
                    self._cluster.apply_workers(wish),
                    about_pipeline(wish.pipeline),
                )
                for key, wish in decision.workers.items()
            ),
            *(
                self._try(
                    f"delete replica {one.key}", self._cluster.delete_pipeline(one), about_pipeline(one)
                )
                for one in decision.delete_pipelines
            ),
            *(
                self._try(f"delete pod {pod.key}", self._cluster.delete_pod(pod))
                for pod in decision.delete_pods
            ),
            *(
                self._try(
                    f"delete task {task.key}",
                    self._cluster.delete_task(task),
                    about_task(task),
                    gone=partial(self.tasks.gone, task.uid),
                )
                for task in decision.delete_tasks
            ),
            *(
                self._try(f"send the plan to {key}", self._coordinators.send_plan(key, plan), about_key(key))
                for key, plan in decision.plans.items()
            ),
        ]
        results = await asyncio.gather(*first)
        stories: defaultdict[tuple[str, Key], list[Event]] = defaultdict(list)
        for event in decision.events:
            stories[event.kind, event.about].append(event)
        self.held_back = None
        tasks = [
            (task, status, patch)
            for task in snapshot.tasks
            if (status := decision.task_statuses.get(task.key)) is not None
            and (patch := self._due_of_task(task, status, now))
        ]
        # Who has heard nothing yet goes first, then who has heard nothing for longest.
        tasks.sort(
            key=lambda due: (bool(due[0].status.conditions), self.tasks.last_write(due[0].uid) or _LONG_AGO)
        )
        until = self._monotonic() + WRITING
        pipelines = [
            (one, wished, patch)
            for one in snapshot.pipelines
            if (wished := decision.pipeline_statuses.get(one.key)) is not None
            and (patch := self._due_of_pipeline(one, wished, now))
        ]
        results += await asyncio.gather(
            *(
                self._write_pipeline(one, status, patch, stories["LoRAPipeline", one.key], now)
                for one, status, patch in pipelines
            ),
            *(
                self._unless_late(
                    until if task.status.conditions else None,
                    partial(self._write_task, task, status, patch, stories["LoRATask", task.key], now),
                )
                for task, status, patch in tasks
            ),
        )
        return all(results)

    async def _unless_late(self, until: float | None, write: Callable[[], Awaitable[bool]]) -> bool:
        """Write, or leave it to the next pass, which comes at once."""
        async with self._turns:
            if until is not None and self._monotonic() > until:
                self.held_back = NOTHING
                return True
            return await write()

    def _due_of_task(self, task: Task, status: TaskStatus, now: datetime) -> Manifest:
        """The patch to write now; empty when nothing has changed, or when it may wait."""
        if status == task.status:
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
        left = last_write + wait - now
        self.held_back = left if self.held_back is None else min(self.held_back, left)
        return False

    async def _write_task(
        self, task: Task, status: TaskStatus, patch: Manifest, story: list[Event], now: datetime
    ) -> bool:
        write = self._cluster.patch_task_status(task, patch)
        done = await self._try(
            f"write the status of task {task.key}",
            write,
            about_task(task, status.pipeline),
            gone=lambda: self.tasks.gone(task.uid),
        )
        if done:
            self.tasks.wrote(task.uid, task.version, status, now)
            if not self.tasks.is_gone(task.uid):
                self._bear_witness(lambda: self._witness.task_written(task, status, now))
            await self._tell(story, about_task(task, status.pipeline))
        return done

    async def _write_pipeline(
        self,
        pipeline: Pipeline,
        status: PipelineStatus,
        patch: Manifest,
        story: list[Event],
        now: datetime,
    ) -> bool:
        write = self._cluster.patch_pipeline_status(pipeline, patch)
        done = await self._try(
            f"write the status of pipeline {pipeline.key}",
            write,
            about_pipeline(pipeline),
            gone=lambda: self.pipelines.gone(pipeline.uid),
        )
        if done:
            self.pipelines.wrote(pipeline.uid, pipeline.version, status, now)
            if not self.pipelines.is_gone(pipeline.uid):
                self._bear_witness(lambda: self._witness.pipeline_written(pipeline, status))
            await self._tell(story, about_pipeline(pipeline))
        return done

    def _bear_witness(self, tell: Callable[[], None]) -> None:
        try:
            tell()
        except Exception:  # who only counts must not stop the work
            logger.exception("what was written could not be counted")

    async def _tell(self, story: list[Event], about: Fields) -> None:
        for event in story:
            level = logging.INFO if event.type == "Normal" else logging.WARNING
            logger.log(
                level, "%s %s: %s: %s", event.kind, event.about, event.reason, event.message, extra=about
            )
            await self._try(f"tell an event of {event.about}", self._cluster.emit_event(event), about)

    async def _try(
        self,
        what: str,
        write: Awaitable[None],
        about: Fields | None = None,
        gone: Callable[[], None] | None = None,
    ) -> bool:
        """One write. What is gone needs no write; any other failure is logged and tried again by the next
        pass.
        """
        async with self._slots:
            try:
                await write
            except Gone:
                if gone is not None:
                    gone()
            except Exception as error:
                logger.warning("could not %s: %s", what, error, extra=about)
                logger.debug("could not %s", what, exc_info=error, extra=about)
                self._witness.write_failed()
                return False
        return True
