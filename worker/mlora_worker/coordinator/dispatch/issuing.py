"""Makes the items of the stream, numbers them, and announces them to all ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, TypedDict

import numpy as np
import torch

from mlora_worker.coordinator.task.evaluation import Best, EvaluationInFlight
from mlora_worker.coordinator.task.in_flight import InFlight
from mlora_worker.coordinator.task.outcome import PendingCheckpoint
from mlora_worker.coordinator.task.probe import PROBE
from mlora_worker.coordinator.task.run import TaskRun
from mlora_worker.data.training_rows.pairs import labels_for, prompt_labels
from mlora_worker.data.training_rows.token_rows import TokenRow
from mlora_worker.pipeline.frames import Payload
from mlora_worker.pipeline.mailbox import Entry
from mlora_worker.protocol import Objective, TaskPhase
from mlora_worker.runtime.log_lines import fields_of
from mlora_worker.stream.grouping import Part
from mlora_worker.stream.items import (
    Checkpoint,
    Evaluate,
    Item,
    Keep,
    Load,
    Pairs,
    Save,
    Segment,
    Stop,
    Train,
    Unload,
    Unpaired,
    Update,
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
        initial = task.prepared.initial
        references = task.references
        task.flight.refers = (
            restoration is not None
            and references is not None
            and references.whole
            and not references.complete
        )
        if initial is not None and (restoration is None or task.flight.refers):
            item = item.model_copy(update={"updates": 0})
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
            lengths=lengths_of(rows),
            row_weights=weights,
            **_preferences(task, rows, indices, found.likelihood, found.kl, of_evaluation=True),
            update=task.flight.take_update(),
        )
        return item, self._announced(item, rows, [task.plan.training.preference] * len(rows))

    def refer(
        self,
        task: TaskRun,
        rows: Sequence[TokenRow],
        of: Literal["base", "adapter"],
        update: Update | None = None,
    ) -> Entry:
        """Log-probabilities of ``rows`` are asked for, after ``update``."""
        item = Evaluate(
            number=self._next_number(), task=task.uid, lengths=lengths_of(rows), reference=of, update=update
        )
        return self._announced(item, rows, [None] * len(rows))

    def train(self, parts: tuple[Part, ...], run_of: Callable[[str], TaskRun]) -> tuple[Train, Entry]:
        """One microbatch of the parts' rows."""
        segments, rows, preferences = [], [], []
        for part in parts:
            task = run_of(part.task)
            step = task.flight.step
            assert step is not None
            assert task.prepared is not None
            update, discard = None, False
            if part.first_row == 0:
                step.issued = self._clock()
                update, discard = task.flight.take_update(), task.flight.take_discard()
            indices = step.rows[part.first_row : part.first_row + len(part.lengths)]
            own = [task.prepared.rows[index] for index in indices]
            segments.append(
                Segment(
                    task=task.uid,
                    step=step.step,
                    lengths=lengths_of(own),
                    first_row=part.first_row * len(own[0].lengths),
                    weight=step.weight,
                    row_weights=step.weights_of(part.first_row, len(part.lengths)),
                    **_preferences(task, own, indices, step.likelihood, step.kl),
                    closes_step=part.closes_step,
                    update=update,
                    discard=discard,
                )
            )
            rows += own
            preferences += [task.plan.training.preference] * len(own)
        item = Train(number=self._next_number(), segments=tuple(segments))
        return item, self._announced(item, rows, preferences)

    def stop(self) -> Entry:
        return self._issue(Stop(number=self._next_number()))

    def _announced(
        self,
        item: Train | Evaluate,
        rows: Sequence[TokenRow],
        preferences: Sequence[Objective | None],
    ) -> Entry:
        """``preferences``: of each row, the objective that decides its labels."""
        labels = [labels_for(row, preference) for row, preference in zip(rows, preferences, strict=True)]
        targets = np.concatenate(labels).astype(np.int64)
        self._announce(item, {} if self._stages == 1 else {self._stages - 1: targets.tobytes()})
        return Entry(
            item,
            token_ids=torch.from_numpy(np.concatenate([row.ids for row in rows]).astype(np.int64)),
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


def lengths_of(rows: Sequence[TokenRow]) -> tuple[int, ...]:
    """Tokens of each sequence: of a pair there are two."""
    return tuple(length for row in rows for length in row.lengths)


class _Preferences(TypedDict, total=False):
    """Of a segment or an evaluation."""

    pairs: Pairs
    unpaired: Unpaired


def _preferences(
    task: TaskRun,
    rows: Sequence[TokenRow],
    indices: Sequence[int],
    likelihood: float,
    kl: float | None,
    *,
    of_evaluation: bool = False,
) -> _Preferences:
    """``indices``: of ``rows`` among those that are trained on, or evaluated on. Nothing where these are no preferences."""
    preference = task.plan.training.preference
    if preference is None:
        return {}
    reference = None
    if task.references is not None:
        table = task.references.evaluation if of_evaluation else task.references.train
        assert table is not None
        reference = table.of_rows(indices)
    if not preference.paired:
        assert reference is not None
        desirable = tuple(bool(row.desirable) for row in rows)
        return {"unpaired": Unpaired(desirable=desirable, reference=reference, kl=kl or 0.0)}
    prompts = tuple(map(prompt_labels, rows)) if preference.learns_prompts else None
    return {"pairs": Pairs(likelihood=likelihood, prompts=prompts, reference=reference)}
