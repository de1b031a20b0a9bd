"""From a decision to writes: only what differs, each by itself, so that one failure holds nothing else up."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable
from datetime import datetime
from functools import partial

from mlora_operator.api.pipeline import PipelineStatus
from mlora_operator.api.task import TaskStatus
from mlora_operator.reconcile.decision import Decision, Event
from mlora_operator.reconcile.ports import Cluster, Coordinators, Gone
from mlora_operator.reconcile.snapshot import Key, Pipeline, Snapshot, Task
from mlora_operator.reconcile.statuses import difference, is_due
from mlora_operator.reconcile.witness import Nobody, Witness
from mlora_operator.reconcile.written import Written

logger = logging.getLogger(__name__)
AT_ONCE = 16  # writes in flight


class Writer:
    """Carries decisions out. Its memory of own writes is a cache (see ``written``)."""

    def __init__(self, cluster: Cluster, coordinators: Coordinators, witness: Witness | None = None) -> None:
        self._cluster = cluster
        self._coordinators = coordinators
        self._witness = witness or Nobody()
        self._slots = asyncio.Semaphore(AT_ONCE)
        self.tasks: Written[TaskStatus] = Written()
        self.pipelines: Written[PipelineStatus] = Written()

    async def act(self, snapshot: Snapshot, decision: Decision, now: datetime) -> bool:
        """Carry ``decision`` out. False when a write failed and the loop should come back soon."""
        first = [
            *(
                self._try("make a pipeline", self._cluster.apply_pipeline(one))
                for one in decision.new_pipelines
            ),
            *(
                self._try(f"apply the workers of {key}", self._cluster.apply_workers(wish))
                for key, wish in decision.workers.items()
            ),
            *(
                self._try(f"delete pod {pod.key}", self._cluster.delete_pod(pod))
                for pod in decision.delete_pods
            ),
            *(
                self._try(
                    f"delete task {task.key}",
                    self._cluster.delete_task(task),
                    gone=partial(self.tasks.gone, task.uid),
                )
                for task in decision.delete_tasks
            ),
            *(
                self._try(f"send the plan to {key}", self._coordinators.send_plan(key, plan))
                for key, plan in decision.plans.items()
            ),
        ]
        results = await asyncio.gather(*first)
        stories: defaultdict[tuple[str, Key], list[Event]] = defaultdict(list)
        for event in decision.events:
            stories[event.kind, event.about].append(event)
        statuses = [
            *(
                self._write_task(task, decision.task_statuses[task.key], stories["LoRATask", task.key], now)
                for task in snapshot.tasks
                if task.key in decision.task_statuses
            ),
            *(
                self._write_pipeline(
                    one, decision.pipeline_statuses[one.key], stories["LoRAPipeline", one.key], now
                )
                for one in snapshot.pipelines
                if one.key in decision.pipeline_statuses
            ),
        ]
        results += await asyncio.gather(*statuses)
        return all(results)

    async def _write_task(self, task: Task, status: TaskStatus, story: list[Event], now: datetime) -> bool:
        patch = difference(task.status, status)
        if not is_due(patch, self.tasks.last_write(task.uid), now):
            return True
        write = self._cluster.patch_task_status(task, patch)
        done = await self._try(
            f"write the status of task {task.key}", write, gone=lambda: self.tasks.gone(task.uid)
        )
        if done:
            self.tasks.wrote(task.uid, task.version, status, now)
            if not self.tasks.is_gone(task.uid):
                self._witness.task_written(task, status, now)
            await self._tell(story)
        return done

    async def _write_pipeline(
        self, pipeline: Pipeline, status: PipelineStatus, story: list[Event], now: datetime
    ) -> bool:
        patch = difference(pipeline.status, status)
        if not is_due(patch, self.pipelines.last_write(pipeline.uid), now):
            return True
        write = self._cluster.patch_pipeline_status(pipeline, patch)
        done = await self._try(
            f"write the status of pipeline {pipeline.key}",
            write,
            gone=lambda: self.pipelines.gone(pipeline.uid),
        )
        if done:
            self.pipelines.wrote(pipeline.uid, pipeline.version, status, now)
            if not self.pipelines.is_gone(pipeline.uid):
                self._witness.pipeline_written(pipeline, status)
            await self._tell(story)
        return done

    async def _tell(self, story: list[Event]) -> None:
        for event in story:
            extra = {"task" if event.kind == "LoRATask" else "pipeline": str(event.about)}
            level = logging.INFO if event.type == "Normal" else logging.WARNING
            logger.log(
                level, "%s %s: %s: %s", event.kind, event.about, event.reason, event.message, extra=extra
            )
            await self._try(f"tell an event of {event.about}", self._cluster.emit_event(event))

    async def _try(self, what: str, write: Awaitable[None], gone: Callable[[], None] | None = None) -> bool:
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
                logger.warning("could not %s: %s", what, error)
                logger.debug("could not %s", what, exc_info=error)
                self._witness.write_failed()
                return False
        return True
