"""Makes the items of the stream, numbers them, and announces them to all ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from mlora_worker.coordinator.task.evaluation import Best, EvaluationInFlight
from mlora_worker.coordinator.task.in_flight import InFlight
from mlora_worker.coordinator.task.outcome import PendingCheckpoint
from mlora_worker.coordinator.task.probe import PROBE
from mlora_worker.coordinator.task.run import TaskRun
from mlora_worker.pipeline.frames import Payload
from mlora_worker.pipeline.mailbox import Entry
from mlora_worker.protocol import TaskPhase
from mlora_worker.runtime.log_lines import fields_of
from mlora_worker.stream.grouping import Part
from mlora_worker.stream.items import (
    Checkpoint,
    Evaluate,
    Item,
    Keep,
    Load,
    Save,
    Segment,
    Stop,
    Train,
    Unload,
)
from mlora_worker.stream.rule import IssueRule

log = logging.getLogger(__name__)

# Sends an item to all other ranks, and to some stages a payload with it: labels to the last one, states to be taken up.
Announce = Callable[[Item, Mapping[int, Payload]], None]


class InStream:
    """The tasks that are in the stream, in the plan's order. Thousands may wait: what is asked for each microbatch looks at
    these alone, and passes over the others once, when one comes or leaves."""

    def __init__(self, tasks: Mapping[str, TaskRun]) -> None:
        self._tasks = tasks
        self._inside: list[TaskRun] = []

    def __iter__(self) -> Iterator[TaskRun]:
        return iter(self._inside)

    def __len__(self) -> int:
        return len(self._inside)

    def refresh(self) -> None:
        """One came or left."""
        self._inside = [task for task in self._tasks.values() if task.in_stream]


class Issuer:
    """Each method gives the entry for rank 0, already announced to the others."""

    def __init__(
        self,
        *,
        stages: int,
        rule: IssueRule,
        inside: InStream,
        announce: Announce,
        on_change: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._stages, self._rule, self._inside = stages, rule, inside
        self._announce, self._on_change, self._clock = announce, on_change, clock
        self._number = 0
        self.shared = 0  # number of the newest item that was issued with several tasks in the stream

    def load(self, task: TaskRun) -> Entry:
        assert task.prepared is not None
        task.in_stream, task.phase = True, TaskPhase.TRAINING
        self._inside.refresh()
        task.flight = InFlight(started=self._clock())
        load = task.prepared.load
        self._rule.join(task.uid, load.tokens, load.rows, load.spread)
        task.load_number = self._next_number()
        item = Load(number=task.load_number, task=task.uid, lora=task.plan.lora, training=task.plan.training)
        restoration = task.checkpoint.restoration
        if restoration is None and task.prepared.initial is not None:
            item, initial = item.model_copy(update={"updates": 0}), task.prepared.initial
            self._tell(item, initial.payloads)
            return Entry(item, state=initial.own)
        if restoration is None:
            return self._issue(item)
        task.resume(restoration)
        if not task.writing:
            task.checkpoint = task.checkpoint.released()
        log.info("%s resumes after step %d", task.name, task.progress.step, extra=fields_of(task.plan))
        item = item.model_copy(update={"updates": task.progress.updates})
        self._tell(item, restoration.payloads)
        return Entry(item, state=restoration.own)

    def load_probe(self, made: TaskRun) -> Entry:
        """A task that was made up (``probe``)."""
        assert made.prepared is not None
        self._rule.join(PROBE, made.prepared.load.tokens, made.prepared.load.rows)
        return self._issue(
            Load(number=self._next_number(), task=PROBE, lora=made.plan.lora, training=made.plan.training)
        )

    def unload_probe(self) -> Entry:
        self._rule.leave(PROBE)
        return self._issue(Unload(number=self._next_number(), task=PROBE))

    def unload(self, task: TaskRun) -> Entry:
        """The rule knows it no longer."""
        task.in_stream = False
        self._inside.refresh()
        if task.phase is TaskPhase.TRAINING:
            task.step_out()
        return self._issue(Unload(number=self._next_number(), task=task.uid))

    def checkpoint(self, task: TaskRun) -> Entry:
        """What it has done up to now, also if a later try of its next step was void: that is not in it."""
        item = Checkpoint(number=self._next_number(), task=task.uid, update=task.flight.take_update())
        progress = task.saved_progress()
        task.checkpoint = task.checkpoint.begun(
            PendingCheckpoint(
                item.number, progress, best=task.best, history=task.history.lines(progress.step)
            )
        )
        return self._issue(item)

    def keep(self, task: TaskRun) -> Entry:
        record = task.progress.evaluated.best
        assert record is not None
        task.flight.keep_is_due = False
        item = Keep(number=self._next_number(), task=task.uid)
        task.best = Best(item.number, record)
        return self._issue(item)

    def save(self, task: TaskRun) -> Entry:
        task.phase = TaskPhase.SAVING
        return self._issue(Save(number=self._next_number(), task=task.uid, update=task.flight.take_update()))

    def evaluate(self, task: TaskRun, found: EvaluationInFlight) -> tuple[Evaluate, Entry]:
        """The next microbatch of ``found``."""
        assert task.prepared is not None
        assert task.prepared.evaluation is not None
        indices = found.left.pop()
        rows = [task.prepared.evaluation.rows[index] for index in indices]
        weights = None if found.row_weights is None else tuple(found.row_weights[index] for index in indices)
        found.outstanding += 1
        item = Evaluate(
            number=self._next_number(),
            task=task.uid,
            lengths=tuple(len(row.ids) for row in rows),
            row_weights=weights,
            update=task.flight.take_update(),
        )
        return item, self._announced(item, [row.ids for row in rows], [row.labels for row in rows])

    def train(self, parts: tuple[Part, ...], run_of: Callable[[str], TaskRun]) -> tuple[Train, Entry]:
        """One microbatch of the parts' rows."""
        segments, ids, labels = [], [], []
        for part in parts:
            task = run_of(part.task)
            step = task.flight.step
            assert step is not None
            assert task.prepared is not None
            update, discard = None, False
            if part.first_row == 0:
                step.issued = self._clock()
                update, discard = task.flight.take_update(), task.flight.take_discard()
            segments.append(
                Segment(
                    task=task.uid,
                    step=step.step,
                    lengths=part.lengths,
                    first_row=part.first_row,
                    weight=step.weight,
                    row_weights=step.weights_of(part.first_row, len(part.lengths)),
                    closes_step=part.closes_step,
                    update=update,
                    discard=discard,
                )
            )
            for index in step.rows[part.first_row : part.first_row + len(part.lengths)]:
                ids.append(task.prepared.rows[index].ids)
                labels.append(task.prepared.rows[index].labels)
        item = Train(number=self._next_number(), segments=tuple(segments))
        return item, self._announced(item, ids, labels)

    def stop(self) -> Entry:
        return self._issue(Stop(number=self._next_number()))

    def _announced(
        self,
        item: Train | Evaluate,
        ids: Sequence[npt.NDArray[np.int32]],
        labels: Sequence[npt.NDArray[np.int32]],
    ) -> Entry:
        """``ids`` and ``labels``: of each row."""
        targets = np.concatenate(labels).astype(np.int64)
        self._announce(item, {} if self._stages == 1 else {self._stages - 1: targets.tobytes()})
        return Entry(
            item,
            token_ids=torch.from_numpy(np.concatenate(ids).astype(np.int64)),
            labels=torch.from_numpy(targets) if self._stages == 1 else None,
        )

    def _next_number(self) -> int:
        self._number += 1
        if len(self._inside) > 1:
            self.shared = self._number
        return self._number

    def _issue(self, item: Item) -> Entry:
        self._tell(item, {})
        return Entry(item)

    def _tell(self, item: Item, payloads: Mapping[int, Payload]) -> None:
        self._announce(item, payloads)
        self._on_change()
