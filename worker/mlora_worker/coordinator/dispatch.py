"""Turns tasks into items of the stream, and what comes back into progress.

``supply`` is asked by rank 0's loop whenever it has nothing more urgent; it answers with the next item in this order:

1. unload what is leaving and has nothing in flight,
2. save what has done all its steps,
3. load what is admitted and prepared,
4. the next microbatch that the issue rule allows.

So a task joins, saves and leaves between microbatches of the others, which never wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from mlora_worker.coordinator.tasks import TaskRun
from mlora_worker.pipeline.mailbox import Entry
from mlora_worker.protocol import TaskPhase
from mlora_worker.stream.grouping import Part
from mlora_worker.stream.items import Item, Load, Save, Segment, Train, Unload
from mlora_worker.stream.rule import IssueRule

Announce = Callable[
    [Item, bytes], None
]  # sends an item to all other ranks; the payload (labels) to the last one


class Dispatcher:
    """Not thread-safe: every call is made with the coordinator's lock held."""

    def __init__(
        self,
        *,
        stages: int,
        budget: int,
        tasks: Mapping[str, TaskRun],
        announce: Announce,
        on_change: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._last_is_here = stages == 1
        self._tasks = tasks
        self._rule = IssueRule(stages, budget)
        self._announce, self._on_change, self._clock = announce, on_change, clock
        self._number = 0
        self._trains: dict[int, Train] = {}  # in flight
        self.tokens = 0
        self.microbatches = 0
        self.concurrent_tasks = 0

    def supply(self) -> Entry | None:
        """The next entry for rank 0, already announced to the others; None when there is nothing to issue."""
        for task in list(self._tasks.values()):
            if task.leaving and self._rule.is_idle(task.uid):
                return self._unload(task)
        for task in self._tasks.values():
            done = task.phase is TaskPhase.TRAINING and task.in_stream and task.steps_done >= task.total_steps
            if done and self._rule.is_idle(task.uid):
                return self._save(task)
        for task in self._tasks.values():
            if (
                task.phase is TaskPhase.PREPARED
                and task.plan.admitted
                and not task.in_stream
                and not task.withdrawn
            ):
                return self._load(task)
        parts = self._rule.next(self._row_lengths, lambda uid: self._tasks[uid].may_step)
        return self._train(parts) if parts is not None else None

    def returned(self, number: int, stats: Tensor) -> None:
        """Microbatch ``number`` is back on rank 0 with stats [segments, 2] of (loss sum, squared gradient norm)."""
        train = self._trains.pop(number)
        for segment, (loss_sum, squared_norm) in zip(train.segments, stats.tolist(), strict=True):
            flight = self._tasks[segment.task].in_flight
            assert flight is not None
            flight.loss_sum += loss_sum
            flight.squared_norm += squared_norm
        for uid in self._rule.returned([segment.task for segment in train.segments]):
            self._tasks[uid].finish_step(self._clock())
        self._on_change()

    def _next_number(self) -> int:
        self._number += 1
        return self._number

    def _issue(self, item: Item) -> Entry:
        self._announce(item, b"")
        self._on_change()
        return Entry(item)

    def _load(self, task: TaskRun) -> Entry:
        assert task.prepared is not None
        task.in_stream, task.phase = True, TaskPhase.TRAINING
        task.started = self._clock()
        rows = task.prepared.steps.rows_of_step(1)
        self._rule.join(task.uid, sum(len(task.prepared.rows[row].ids) for row in rows))
        lora = task.plan.lora.model_copy(update={"target_modules": task.prepared.targets})
        return self._issue(
            Load(number=self._next_number(), task=task.uid, lora=lora, training=task.plan.training)
        )

    def _save(self, task: TaskRun) -> Entry:
        task.phase = TaskPhase.SAVING
        update, task.update = task.update, None
        return self._issue(Save(number=self._next_number(), task=task.uid, update=update))

    def _unload(self, task: TaskRun) -> Entry:
        self._rule.leave(task.uid)
        task.in_stream = False
        if task.phase is TaskPhase.TRAINING:
            task.restart()
        return self._issue(Unload(number=self._next_number(), task=task.uid))

    def _row_lengths(self, uid: str) -> list[int]:
        task = self._tasks[uid]
        assert task.prepared is not None
        return [len(task.prepared.rows[row].ids) for row in task.begin_step().rows]

    def _train(self, parts: tuple[Part, ...]) -> Entry:
        segments, ids, labels = [], [], []
        for part in parts:
            task = self._tasks[part.task]
            flight = task.in_flight
            assert flight is not None
            assert task.prepared is not None
            update = None
            if part.first_row == 0:
                update, task.update = task.update, None
            segments.append(
                Segment(
                    task=task.uid,
                    step=flight.step,
                    lengths=part.lengths,
                    first_row=part.first_row,
                    weight=flight.weight,
                    closes_step=part.closes_step,
                    update=update,
                )
            )
            for index in flight.rows[part.first_row : part.first_row + len(part.lengths)]:
                ids.append(task.prepared.rows[index].ids)
                labels.append(task.prepared.rows[index].labels)
        item = Train(number=self._next_number(), segments=tuple(segments))
        self._trains[item.number] = item
        self.microbatches += 1
        self.tokens += item.tokens
        self.concurrent_tasks = max(self.concurrent_tasks, self._rule.in_flight)
        targets = np.concatenate(labels).astype(np.int64)
        self._announce(item, b"" if self._last_is_here else targets.tobytes())
        return Entry(
            item,
            token_ids=torch.from_numpy(np.concatenate(ids).astype(np.int64)),
            labels=torch.from_numpy(targets) if self._last_is_here else None,
        )
