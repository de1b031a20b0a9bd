"""Turns tasks into items of the stream, and what comes back into progress.

``supply`` is asked by rank 0's loop whenever it has nothing more urgent; it answers with the next item in this order:

1. unload what is leaving and has nothing in flight, behind a checkpoint of what it has done,
2. save what has done all its steps,
3. load what is admitted and prepared, or has its checkpoint at hand,
4. take the checkpoint of a task that is due,
5. the step of a task that is on trial, alone,
6. the next microbatch that the issue rule allows, or one of an evaluation: they take turns.

So a task joins, is saved and leaves between microbatches of the others, which never wait for it.

After ``wind_down`` no task is loaded and no step begins. Steps that have begun come back, every task has its checkpoint,
and once these are in the store the stream stops.

A step of which any microbatch came back with a fault is void: no update follows, and it is issued again with the word to
discard what it left behind. ``trials.py`` finds out whose fault it was.

A task whose adapter cannot be made, updated or saved is broken on that stage. It fails; but when memory lacked, it leaves,
and goes on from its newest checkpoint when there is more room. Memory may lack because others are there, because tasks that
are out have not let go of all yet, or because the process has not given back what they let go of. So a task fails for want
of memory only when that has happened twice in a row, the second time on a stage that was emptied before.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mlora_worker.coordinator.task.evaluation import Assessment, Best
from mlora_worker.coordinator.task.fault_attribution import Charge, Trials
from mlora_worker.coordinator.task.fault_message import explain
from mlora_worker.coordinator.task.known_good import WITNESS, witness
from mlora_worker.coordinator.task.outcome import Snapshot
from mlora_worker.coordinator.task.run import TaskRun
from mlora_worker.pipeline.faults import Fault
from mlora_worker.pipeline.frames import Payload
from mlora_worker.pipeline.mailbox import Entry
from mlora_worker.protocol import FailureReason, MemoryExhausted, TaskPhase
from mlora_worker.runtime.log_lines import fields_of
from mlora_worker.stream.costs import StageCost
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

_MOST_EXHAUSTED = 8
LOOK_AGAIN = 1.0  # seconds, while a task waits for memory that tasks which are out still hold
_EVALUATIONS_AHEAD = 2  # microbatches of evaluations in the pipeline, for each stage

# Sends an item to all other ranks, and to some stages a payload with it: labels to the last one, states to be taken up.
Announce = Callable[[Item, Mapping[int, Payload]], None]


class PipelineFault(RuntimeError):
    """Every task fails in the same way, even alone: it is not theirs."""


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
        on_pipeline_fault: Callable[[Exception], None],
        clock: Callable[[], float],
        on_wanted: Callable[[TaskRun], None] | None = None,
        costs: Sequence[StageCost] | None = None,
        on_stepped: Callable[[float], None] = lambda _: None,
        held: Callable[[], Sequence[int]] = tuple,
        look_again: Callable[[], None] = lambda: None,
    ) -> None:
        """``budget``: most tokens of a microbatch. ``costs``: of each stage; None when nothing is known of them.
        ``on_wanted`` is told, once, of a task that may be loaded as soon as it has its ``restoration``; ``on_stepped``, how
        many seconds each step took that came back whole. ``held``: bytes on each stage that tasks hold which are not in the
        stream; ``look_again`` has ``supply`` asked a little later, when that may be less.
        """
        self._stages = stages
        self._tasks = tasks
        self._rule = IssueRule(stages, budget, costs)
        self._announce, self._on_change, self._clock = announce, on_change, clock
        self._on_pipeline_fault, self._on_wanted = on_pipeline_fault, on_wanted
        self._on_stepped = on_stepped
        self._held, self._look_again, self._looks_at = held, look_again, 0.0
        self._winding_down = self._stopped = False
        # Thousands may wait. What is asked for each microbatch looks at those in the stream alone, in the plan's order, and
        # passes over the others once.
        self._inside: list[TaskRun] = []
        self._crowded_out: dict[str, TaskRun] = {}
        self._number = 0
        self._shared = 0  # number of the newest item that was issued with several tasks in the stream
        self._trains: dict[int, Train] = {}  # in flight
        self._faults: dict[int, list[Fault]] = {}  # of those, as far as they have been told
        self._evaluations: dict[int, Assessment] = {}  # microbatches that are not back yet
        self._evaluated_last = False  # the newest microbatch was an evaluation's
        self._unexplained: dict[
            int, Tensor
        ] = {}  # stats that are back before all their faults have been told
        self._trials = Trials()
        self._witness: TaskRun | None = None  # one that was made up, while it is in the stream
        self.exhausted: deque[MemoryExhausted] = deque(
            maxlen=_MOST_EXHAUSTED
        )  # where memory ran out, newest last
        self.tokens = self.microbatches = 0  # that came back whole
        self.concurrent_tasks = 0

    def supply(self) -> Entry | None:
        """The next entry for rank 0, already announced to the others; None when there is nothing to issue."""
        for task in self._inside:
            # Before it leaves, too: its checkpoint says which one was best.
            if task.keep_is_due and task.phase is TaskPhase.TRAINING and not task.broken:
                return self._keep(task)
        for task in self._inside:
            if not task.leaving or not self._rule.is_idle(task.uid):
                continue
            if not task.unsaved:
                return self._unload(task)
            if task.snapshot is None:
                return self._checkpoint(task)
        if self._witness is not None and self._trials.next != WITNESS and self._rule.is_idle(WITNESS):
            return self._dismiss()
        if self._winding_down:
            return self._wind_down()
        self._welcome_back()
        for task in self._inside:
            if task.at_end and self._rule.is_idle(task.uid):
                return self._save(task)
        for task in self._tasks.values():
            # The first two are plain fields, and false for most of those that wait.
            if task.plan.admitted and not task.in_stream and task.may_load and self._is_at_hand(task):
                return self._load(task)
        for task in self._inside:
            if task.checkpoint_is_due and self._rule.is_idle(task.uid):
                return self._checkpoint(task)
        if self._trials.next == WITNESS and self._witness is None:
            return self._call_witness()
        if self._trials.next is not None:
            parts = self._rule.next_alone(self._trials.next, self._row_lengths)
        else:
            if not self._evaluated_last and (entry := self._evaluate()) is not None:
                return entry
            parts = self._rule.next(self._row_lengths, lambda uid: self._tasks[uid].may_step)
            if parts is None:
                return self._evaluate()
        return self._train(parts) if parts is not None else None

    def wind_down(self) -> None:
        """Come to an end, with all that was done in checkpoints."""
        self._winding_down = True
        self._on_change()

    @property
    def stopped(self) -> bool:
        """The last item was issued."""
        return self._stopped

    def returned(self, number: int, stats: Tensor) -> None:
        """Microbatch ``number`` is back on rank 0 with stats [segments, 3] of (loss sum, squared gradient norm, faults)."""
        faults = self._faults.get(number, [])
        if len(faults) < int(stats[0, 2]):
            self._unexplained[number] = stats  # the links bring the rest
            return
        train = self._trains.pop(number)
        self._faults.pop(number, None)
        if not faults:
            self.microbatches += 1
            self.tokens += train.tokens
        for segment, (loss_sum, squared_norm, _) in zip(train.segments, stats.tolist(), strict=True):
            flight = self._run(segment.task).in_flight
            assert flight is not None
            flight.loss_sum += loss_sum
            flight.squared_norm += squared_norm
            flight.void |= bool(faults)
            for fault in faults:
                if fault.task == segment.task != WITNESS:
                    flight.own_fault = fault
                elif fault.task in (None, WITNESS):
                    flight.accept(Charge(fault, train.tokens, sum(len(s.lengths) for s in train.segments)))
        for uid in self._rule.returned([segment.task for segment in train.segments]):
            self._finish_step(self._run(uid))
        self._judge()
        self._on_change()

    def evaluated(self, number: int, scores: Tensor) -> None:
        """A microbatch of an evaluation has come to the end, with scores [2]: sum of losses, correct predictions."""
        found = self._evaluations.pop(number, None)
        if found is not None:
            found.add(scores)
            self.microbatches += 1
        for task in self._inside:
            if task.assessment is not None and task.assessment is found and found.complete:
                task.finish_evaluation()
        self._on_change()

    def keep(self, stage: int, uid: str, number: int, tensors: dict[str, Tensor]) -> None:
        """A stage's part of the adapter that evaluated best."""
        task = self._tasks.get(uid)
        if task is None:
            return
        for best in (task.best, task.snapshot.best if task.snapshot is not None else None):
            if best is not None and best.number == number:
                best.parts[stage] = tensors

    def faulted(self, fault: Fault) -> None:
        """A stage tells of a fault. That of a microbatch counts when the microbatch is back."""
        lost = self._evaluations.pop(fault.number, None)  # no scores may come
        for other in self._inside:
            if lost is not None and other.assessment is lost:
                other.assessment = None
        if fault.number in self._trains:
            self._faults.setdefault(fault.number, []).append(fault)
            stats = self._unexplained.pop(fault.number, None)
            if stats is not None:
                self.returned(fault.number, stats)
            return
        task = self._tasks.get(fault.task) if fault.task is not None else None
        if task is None or fault.number < task.load_number:  # gone, or back with a new adapter
            return
        # Out of the stream, it may still lack parts of a checkpoint or of its adapter that will not come.
        lacks_parts = task.phase is TaskPhase.SAVING or (
            task.snapshot is not None and task.snapshot.number == fault.number
        )
        if not (lacks_parts or (task.phase is TaskPhase.TRAINING and task.in_stream)):
            return
        if not self._lacks_room(task, fault):
            self._fail(task, fault)
        elif self._rule.is_idle(task.uid) and not task.broken:
            self._roll_back(task, fault)
        # Else a step of it comes back with the same fault.
        self._on_change()

    def _finish_step(self, task: TaskRun) -> None:
        """All microbatches of its step are back."""
        flight = task.in_flight
        assert flight is not None
        if not flight.void or task.phase is not TaskPhase.TRAINING:
            self._trials.clear(task.uid)
            if flight.issued is not None and not flight.void:
                self._on_stepped(self._clock() - flight.issued)
            task.finish_step(self._clock())
        elif flight.own_fault is not None:
            if self._lacks_room(task, flight.own_fault):
                self._roll_back(task, flight.own_fault)
            else:
                self._fail(task, flight.own_fault)
                task.finish_step(self._clock())
        else:
            if flight.charge is not None:
                log.warning(
                    "step %d of %s repeats alone: %s of stage %d failed: %s",
                    flight.step, task.name, flight.charge.fault.phase, flight.charge.fault.stage,
                    flight.charge.fault.error, extra=fields_of(task.plan),
                )  # fmt: skip
                tokens = self._trials.accuse(task.uid, flight.charge)
                if tokens is not None:
                    self._narrow(task, tokens)
            task.repeat_step()

    def _judge(self) -> None:
        verdict = self._trials.verdict([task.uid for task in self._inside if task.may_step], WITNESS)
        if verdict is None:
            return
        if verdict.pipeline is not None:
            fault = verdict.pipeline
            self._on_pipeline_fault(
                PipelineFault(f"every task fails in {fault.phase} on stage {fault.stage}: {fault.error}")
            )
        for uid, fault in verdict.convicted.items():
            task = self._tasks[uid]
            if not self._lacks_room(task, fault):
                self._fail(task, fault)
            elif self._is_alone(task, fault):
                self._crowd_out(task, fault)
            else:
                self._make_room(fault, (uid,))
        for uid, tokens in verdict.narrowed.items():
            self._narrow(self._tasks[uid], tokens)
        if verdict.full is not None:
            self._make_room(verdict.full, verdict.accused)

    def _run(self, uid: str) -> TaskRun:
        return self._witness if uid == WITNESS and self._witness is not None else self._tasks[uid]

    def _call_witness(self) -> Entry | None:
        """Every task fails in the same way: one that was made up is loaded, once nothing else is in the pipeline."""
        if self._rule.in_flight:
            return None
        self._witness = made = witness()
        assert made.prepared is not None
        self._rule.join(WITNESS, made.prepared.load.tokens, made.prepared.load.rows)
        item = Load(
            number=self._next_number(), task=WITNESS, lora=made.plan.lora, training=made.plan.training
        )
        return self._issue(item)

    def _dismiss(self) -> Entry:
        self._witness = None
        self._rule.leave(WITNESS)
        return self._issue(Unload(number=self._next_number(), task=WITNESS))

    def _make_room(self, fault: Fault, accused: Sequence[str]) -> None:
        """Memory ran out for what several tasks hold together: the newest of ``accused`` leaves, behind a checkpoint of
        what it has done, and comes back when another one has left or the operator has planned anew."""
        if len(self._inside) == 1:
            return  # it passed alone, so the fault was none of memory that others hold: it goes on
        self._crowd_out(
            max((self._tasks[uid] for uid in accused), key=lambda task: task.load_number),
            fault,
        )

    def _roll_back(self, task: TaskRun, fault: Fault) -> None:
        """Memory ran out for its adapter, which is broken on a stage: it leaves, and comes back as above, but goes on from
        the newest checkpoint that there is already."""
        self._trials.drop(task.uid)
        self._crowd_out(task, fault)
        task.roll_back()

    def _crowd_out(self, task: TaskRun, fault: Fault) -> None:
        log.warning(
            "%s leaves: memory of stage %d ran out (%s)",
            task.name,
            fault.stage,
            fault.error,
            extra=fields_of(task.plan),
        )
        together = {one.uid for one in self._inside} | {task.uid}
        held = self._held_on(fault.stage)
        task.crowded_out = max(2, len(together))
        self._crowded_out[task.uid] = task
        if held:
            task.waits_for = fault.stage, held
        elif self._is_alone(task, fault):
            task.lacked += 1
        # Told late, it may be the last one: of those that were there nothing is known any more. And where tasks that are
        # out held some, those that were there may well fit together.
        if len(together) > 1 and not held:
            self.exhausted.append(MemoryExhausted(stage=fault.stage, tasks=tuple(sorted(together))))

    def _lacks_room(self, task: TaskRun, fault: Fault) -> bool:
        """Memory ran out, and waiting may mend that."""
        if not fault.out_of_memory:
            return False
        return not self._is_alone(task, fault) or self._held_on(fault.stage) > 0 or not task.lacked

    def _is_alone(self, task: TaskRun, fault: Fault) -> bool:
        """It was then, too: who else is there holds memory, even if it does not compute."""
        return fault.number > self._shared and all(other is task for other in self._inside)

    def _held_on(self, stage: int) -> int:
        held = self._held()
        return held[stage] if stage < len(held) else 0

    def _came_or_left(self) -> None:
        self._inside = [task for task in self._tasks.values() if task.in_stream]

    def _welcome_back(self) -> None:
        """Those who had to leave for want of memory, once that has changed."""
        inside = len(self._inside)
        for uid, task in list(self._crowded_out.items()):
            if task.in_stream:  # not gone yet
                continue
            if self._waits_for_memory(task):
                continue
            if task.withdrawn or not task.plan.admitted or inside < task.crowded_out - 1:
                task.crowded_out = 0
                del self._crowded_out[uid]

    def _waits_for_memory(self, task: TaskRun) -> bool:
        """Tasks that are out hold as much as they did when it left."""
        if task.waits_for is None:
            return False
        stage, held = task.waits_for
        if task.withdrawn or not task.plan.admitted or self._held_on(stage) < held:
            task.waits_for = None
            return False
        if self._clock() >= self._looks_at:  # nobody may tell
            self._looks_at = self._clock() + LOOK_AGAIN
            self._look_again()
        return True

    def _narrow(self, task: TaskRun, tokens: int) -> None:
        log.warning(
            "microbatches of %s have at most %d tokens from now on",
            task.name,
            tokens,
            extra=fields_of(task.plan),
        )
        self._rule.limit(task.uid, tokens)

    def _fail(self, task: TaskRun, fault: Fault) -> None:
        self._trials.drop(task.uid)
        reason = FailureReason.OUT_OF_MEMORY if fault.out_of_memory else FailureReason.INTERNAL_ERROR
        message = explain(fault, task.in_flight.step if task.in_flight else task.steps_done)
        log.warning("%s failed: %s", task.name, message, extra=fields_of(task.plan))
        task.fail(reason, message)

    def _next_number(self) -> int:
        self._number += 1
        if len(self._inside) > 1:
            self._shared = self._number
        return self._number

    def _issue(self, item: Item) -> Entry:
        self._announce(item, {})
        self._on_change()
        return Entry(item)

    def _wind_down(self) -> Entry | None:
        for task in self._inside:
            if task.unsaved and task.snapshot is None and self._rule.is_idle(task.uid):
                return self._checkpoint(task)
        for task in self._inside:
            if task.at_end and not task.unsaved and self._rule.is_idle(task.uid):
                return self._save(task)
        parts = self._rule.next(self._row_lengths, lambda _: False)  # the rest of a step that has begun
        if parts is not None:
            return self._train(parts)
        if self._stopped or self._rule.in_flight or any(task.is_in_hand for task in self._tasks.values()):
            return None
        self._stopped = True
        return self._issue(Stop(number=self._next_number()))

    def _is_at_hand(self, task: TaskRun) -> bool:
        """It has nothing to be taken up, or that is here. If it is not, it is asked for."""
        if not task.resumable or task.restoration is not None:
            return True
        if not task.fetching and self._on_wanted is not None:
            task.fetching = True
            self._on_wanted(task)
        return False

    def _load(self, task: TaskRun) -> Entry:
        assert task.prepared is not None
        task.in_stream, task.phase = True, TaskPhase.TRAINING
        self._came_or_left()
        task.started = self._clock()
        load = task.prepared.load
        self._rule.join(task.uid, load.tokens, load.rows, load.spread)
        task.load_number = self._next_number()
        item = Load(number=task.load_number, task=task.uid, lora=task.plan.lora, training=task.plan.training)
        restoration, task.restoration = task.restoration, None
        if restoration is None and task.prepared.initial is not None:
            item, initial = item.model_copy(update={"updates": 0}), task.prepared.initial
            self._announce(item, initial.payloads)
            self._on_change()
            return Entry(item, state=initial.own)
        if restoration is None:
            return self._issue(item)
        task.resume(restoration)
        if not task.writing:
            task.state = None
        log.info("%s goes on after step %d", task.name, task.steps_done, extra=fields_of(task.plan))
        item = item.model_copy(update={"updates": task.updates})
        self._announce(item, restoration.payloads)
        self._on_change()
        return Entry(item, state=restoration.own)

    def _checkpoint(self, task: TaskRun) -> Entry:
        """What it has done up to now, also if a later try of its next step was void: that is not in it."""
        update, task.update = task.update, None
        item = Checkpoint(number=self._next_number(), task=task.uid, update=update)
        task.snapshot = Snapshot(
            item.number, task.progress(), best=task.best, history=task.history.lines(task.steps_done)
        )
        task.taken_step = task.steps_done
        return self._issue(item)

    def _evaluate(self) -> Entry | None:
        """The next microbatch of an evaluation; None when there is none, or enough of them are on their way."""
        if len(self._evaluations) >= _EVALUATIONS_AHEAD * self._stages:
            return None
        for task in self._inside:
            if task.leaving or not self._rule.is_idle(task.uid):
                continue
            if task.evaluation_is_due:
                assert task.prepared is not None
                assert task.prepared.evaluation is not None
                budget = self._rule.budget_of([task.uid])
                task.assessment = task.prepared.evaluation.begin(task.steps_done, budget)
            if task.assessment is not None and task.assessment.left:
                return self._evaluation_of(task, task.assessment)
        return None

    def _evaluation_of(self, task: TaskRun, found: Assessment) -> Entry:
        assert task.prepared is not None
        assert task.prepared.evaluation is not None
        indices = found.left.pop()
        rows = [task.prepared.evaluation.rows[index] for index in indices]
        weights = None if found.row_weights is None else tuple(found.row_weights[index] for index in indices)
        found.outstanding += 1
        update, task.update = task.update, None
        lengths = tuple(len(row.ids) for row in rows)
        item = Evaluate(
            number=self._next_number(), task=task.uid, lengths=lengths, row_weights=weights, update=update
        )
        self._evaluations[item.number], self._evaluated_last = found, True
        ids, labels = [row.ids for row in rows], [row.labels for row in rows]
        return self._announced(item, ids, labels)

    def _keep(self, task: TaskRun) -> Entry:
        record = task.evaluated.best
        assert record is not None
        task.keep_is_due = False
        item = Keep(number=self._next_number(), task=task.uid)
        task.best = Best(item.number, record)
        return self._issue(item)

    def _save(self, task: TaskRun) -> Entry:
        task.phase = TaskPhase.SAVING
        update, task.update = task.update, None
        return self._issue(Save(number=self._next_number(), task=task.uid, update=update))

    def _unload(self, task: TaskRun) -> Entry:
        self._rule.leave(task.uid)
        self._trials.drop(task.uid)
        self._judge()
        task.in_stream = False
        self._came_or_left()
        if task.phase is TaskPhase.TRAINING:
            task.step_out()
        return self._issue(Unload(number=self._next_number(), task=task.uid))

    def _row_lengths(self, uid: str) -> list[int]:
        task = self._run(uid)
        assert task.prepared is not None
        return [len(task.prepared.rows[row].ids) for row in task.begin_step().rows]

    def _train(self, parts: tuple[Part, ...]) -> Entry:
        segments, ids, labels = [], [], []
        for part in parts:
            task = self._run(part.task)
            flight = task.in_flight
            assert flight is not None
            assert task.prepared is not None
            update, discard = None, False
            if part.first_row == 0:
                flight.issued = self._clock()
                update, task.update = task.update, None
                discard, task.discard = task.discard, False
            segments.append(
                Segment(
                    task=task.uid,
                    step=flight.step,
                    lengths=part.lengths,
                    first_row=part.first_row,
                    weight=flight.weight,
                    row_weights=flight.weights_of(part.first_row, len(part.lengths)),
                    closes_step=part.closes_step,
                    update=update,
                    discard=discard,
                )
            )
            for index in flight.rows[part.first_row : part.first_row + len(part.lengths)]:
                ids.append(task.prepared.rows[index].ids)
                labels.append(task.prepared.rows[index].labels)
        item = Train(number=self._next_number(), segments=tuple(segments))
        self._trains[item.number] = item
        self.concurrent_tasks = max(self.concurrent_tasks, self._rule.in_flight)
        self._evaluated_last = False
        return self._announced(item, ids, labels)

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
            labels=torch.from_numpy(targets) if (self._stages == 1) else None,
        )
