"""Turns tasks into items of the stream, and what comes back into progress.

``supply`` is asked by rank 0's loop whenever it has nothing more urgent; it answers with the next item in this order:

1. unload what is leaving and has nothing in flight, behind a checkpoint of what it has done,
2. save what has done all its steps,
3. load what is admitted and prepared, or has its checkpoint at hand,
4. take the checkpoint of a task that is due,
5. the step of a task that is on trial, alone,
6. the next microbatch that the issue rule allows, or one of an evaluation, or for a divergence or a reference: they take
   turns.

So a task joins, is saved and leaves between microbatches of the others, which never wait for it.

After ``wind_down`` no task is loaded and no step begins. Steps that have begun come back, every task has its checkpoint,
and once these are in the store the stream stops.

A step of which any microbatch came back with a fault is void: no update follows, and it is issued again with the word to
discard what it left behind. ``fault_attribution.py`` finds out whose fault it was.

A task whose adapter cannot be made, updated or saved is broken on that stage. It fails; but when memory lacked, it leaves,
and goes on from its newest checkpoint when there is more room. (``evictions``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from mlora_worker.coordinator.dispatch.divergence_forwards import DivergenceForwards
from mlora_worker.coordinator.dispatch.evaluations import Evaluations
from mlora_worker.coordinator.dispatch.evictions import Evictions
from mlora_worker.coordinator.dispatch.issuing import Announce, InStream, Issuer
from mlora_worker.coordinator.dispatch.reference_forwards import ReferenceForwards
from mlora_worker.coordinator.task.fault_attribution import Charge, Trials
from mlora_worker.coordinator.task.fault_message import explain
from mlora_worker.coordinator.task.probe import PROBE, probe_task
from mlora_worker.coordinator.task.run import TaskRun
from mlora_worker.data.training_rows.reference_files import ReferenceFiles
from mlora_worker.pipeline.faults import Fault
from mlora_worker.pipeline.mailbox import Entry
from mlora_worker.protocol import FailureReason, MemoryExhausted, TaskPhase, WireReport
from mlora_worker.runtime.log_lines import fields_of
from mlora_worker.stream.costs import StageCost
from mlora_worker.stream.grouping import Part
from mlora_worker.stream.items import Train
from mlora_worker.stream.rule import IssueRule

log = logging.getLogger(__name__)


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
        references: ReferenceFiles | None = None,
        later: Callable[[Callable[[], None]], None] = lambda call: call(),
        with_lock: Callable[[Callable[[], None]], None] = lambda call: call(),
    ) -> None:
        """``budget``: most tokens of a microbatch. ``costs``: of each stage; None when nothing is known of them.
        ``on_wanted`` is told, once, of a task that may be loaded as soon as it has its ``restoration``; ``on_stepped``, how
        many seconds each step took that came back whole. ``held``: bytes on each stage that tasks hold which are not in the
        stream; ``look_again`` has ``supply`` asked a little later, when that may be less. ``references``, ``later``,
        ``with_lock``: see ``ReferenceForwards``.
        """
        self._tasks = tasks
        self._rule = IssueRule(stages, budget, costs)
        self._inside = InStream(tasks)
        self._issuer = Issuer(
            stages=stages,
            rule=self._rule,
            inside=self._inside,
            announce=announce,
            on_change=on_change,
            clock=clock,
        )
        self._evaluations = Evaluations(stages, self._rule, self._inside, self._issuer)
        self._references = ReferenceForwards(
            stages, self._rule, self._inside, self._issuer, references, later, with_lock
        )
        self._divergences = DivergenceForwards(stages, self._rule, self._inside, self._issuer)
        self._evictions = Evictions(self._inside, self._issuer, held, look_again, clock)
        self._on_change, self._clock = on_change, clock
        self._on_pipeline_fault, self._on_wanted = on_pipeline_fault, on_wanted
        self._on_stepped = on_stepped
        self._winding_down = self._stopped = False
        self._trains: dict[int, Train] = {}  # in flight
        self._faults: dict[int, list[Fault]] = {}  # of those, as far as they have been told
        self._evaluated_last = False  # the newest microbatch was an evaluation's
        self._unexplained: dict[
            int, Tensor
        ] = {}  # stats that are back before all their faults have been told
        self._trials = Trials()
        self._probe: TaskRun | None = None  # one that was made up, while it is in the stream
        self.tokens = self.microbatches = 0  # that came back whole
        self.concurrent_tasks = 0

    def supply(self) -> Entry | None:
        """The next entry for rank 0, already announced to the others; None when there is nothing to issue."""
        for task in self._inside:
            # Before it leaves, too: its checkpoint says which one was best.
            if task.flight.keep_is_due and task.phase is TaskPhase.TRAINING and not task.flight.broken:
                return self._issuer.keep(task)
        for task in self._inside:
            if not task.leaving or not self._rule.is_idle(task.uid):
                continue
            if not task.unsaved:
                return self._unload(task)
            if task.checkpoint.snapshot is None:
                return self._issuer.checkpoint(task)
        if self._probe is not None and self._trials.next != PROBE and self._rule.is_idle(PROBE):
            return self._unload_probe()
        if self._winding_down:
            return self._wind_down()
        self._evictions.welcome_back()
        for task in self._inside:
            if task.at_end and self._rule.is_idle(task.uid):
                return self._issuer.save(task)
        for task in self._tasks.values():
            # The first two are plain fields, and false for most of those that wait.
            if task.plan.admitted and not task.in_stream and task.may_load and self._is_at_hand(task):
                self._references.join(task)
                return self._issuer.load(task)
        for task in self._inside:
            if task.checkpoint_is_due and self._rule.is_idle(task.uid):
                return self._issuer.checkpoint(task)
        if self._trials.next == PROBE and self._probe is None:
            return self._load_probe()
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
    def exhausted(self) -> tuple[MemoryExhausted, ...]:
        """Where memory ran out, newest last."""
        return tuple(self._evictions.exhausted)

    @property
    def stopped(self) -> bool:
        """The last item was issued."""
        return self._stopped

    def returned(self, number: int, stats: Tensor) -> None:
        """Microbatch ``number`` is back on rank 0 with stats [segments, STATS], see ``pipeline.transport``."""
        faults = self._faults.get(number, [])
        if len(faults) < int(stats[0, 2]):
            self._unexplained[number] = stats  # the links bring the rest
            return
        train = self._trains.pop(number)
        self._faults.pop(number, None)
        if not faults:
            self.microbatches += 1
            self.tokens += train.tokens
        for segment, (loss_sum, squared_norm, _, *rewards) in zip(
            train.segments, stats.tolist(), strict=True
        ):
            step = self._run(segment.task).flight.step
            assert step is not None
            step.add(loss_sum, squared_norm, rewards)
            step.void |= bool(faults)
            for fault in faults:
                if fault.task == segment.task != PROBE:
                    step.own_fault = fault
                elif fault.task in (None, PROBE):
                    step.accept(Charge(fault, train.tokens, sum(len(s.lengths) for s in train.segments)))
        for uid in self._rule.returned([segment.task for segment in train.segments]):
            self._finish_step(self._run(uid))
        self._judge()
        self._on_change()

    def wire(self, payload: int, descriptors: int) -> WireReport:
        """What went through the pipeline so far; the bytes are those of its links."""
        return WireReport(
            payload_bytes=payload,
            descriptor_bytes=descriptors,
            tokens=self.tokens,
            microbatches=self.microbatches,
            concurrent_tasks=self.concurrent_tasks,
        )

    def evaluated(self, number: int, scores: Tensor) -> None:
        """A microbatch of an evaluation, of a reference or of a divergence has come to the end with its scores."""
        asked = (self._references, self._divergences, self._evaluations)
        self.microbatches += any(one.returned(number, scores) for one in asked)
        self._on_change()

    def keep(self, stage: int, uid: str, number: int, tensors: dict[str, Tensor]) -> None:
        """A stage's part of the adapter that evaluated best."""
        task = self._tasks.get(uid)
        if task is None:
            return
        for best in (
            task.best,
            task.checkpoint.snapshot.best if task.checkpoint.snapshot is not None else None,
        ):
            if best is not None and best.number == number:
                best.parts[stage] = tensors

    def faulted(self, fault: Fault) -> None:
        """A stage tells of a fault. That of a microbatch counts when the microbatch is back."""
        self._evaluations.lost(fault.number)
        self._references.lost(fault.number)
        self._divergences.lost(fault.number)
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
        snapshot = task.checkpoint.snapshot
        lacks_parts = task.phase is TaskPhase.SAVING or (
            snapshot is not None and snapshot.number == fault.number
        )
        if not (lacks_parts or (task.phase is TaskPhase.TRAINING and task.in_stream)):
            return
        if not self._evictions.may_pass(task, fault):
            self._fail(task, fault)
        elif self._rule.is_idle(task.uid) and not task.flight.broken:
            self._roll_back(task, fault)
        # Else a step of it comes back with the same fault.
        self._on_change()

    def _finish_step(self, task: TaskRun) -> None:
        """All microbatches of its step are back."""
        step = task.flight.step
        assert step is not None
        if not step.void or task.phase is not TaskPhase.TRAINING:
            self._trials.clear(task.uid)
            if step.issued is not None and not step.void:
                self._on_stepped(self._clock() - step.issued)
            task.finish_step(self._clock())
        elif step.own_fault is not None:
            if self._evictions.may_pass(task, step.own_fault):
                self._roll_back(task, step.own_fault)
            else:
                self._fail(task, step.own_fault)
                task.finish_step(self._clock())
        else:
            if step.charge is not None:
                log.warning(
                    "step %d of %s is repeated alone because %s on stage %d failed: %s",
                    step.step, task.name, step.charge.fault.phase, step.charge.fault.stage,
                    step.charge.fault.error, extra=fields_of(task.plan),
                )  # fmt: skip
                tokens = self._trials.accuse(task.uid, step.charge)
                if tokens is not None:
                    self._narrow(task, tokens)
            task.repeat_step()

    def _judge(self) -> None:
        verdict = self._trials.verdict([task.uid for task in self._inside if task.may_step], PROBE)
        if verdict is None:
            return
        if verdict.pipeline is not None:
            fault = verdict.pipeline
            self._on_pipeline_fault(
                PipelineFault(f"every task fails in {fault.phase} on stage {fault.stage}: {fault.error}")
            )
        for uid, fault in verdict.convicted.items():
            task = self._tasks[uid]
            if not self._evictions.may_pass(task, fault):
                self._fail(task, fault)
            elif self._evictions.is_alone(task, fault):
                self._evictions.evict(task, fault)
            else:
                self._evictions.make_room(fault, (task,))
        for uid, tokens in verdict.narrowed.items():
            self._narrow(self._tasks[uid], tokens)
        if verdict.full is not None:
            self._evictions.make_room(verdict.full, [self._tasks[uid] for uid in verdict.accused])

    def _run(self, uid: str) -> TaskRun:
        return self._probe if uid == PROBE and self._probe is not None else self._tasks[uid]

    def _load_probe(self) -> Entry | None:
        """Every task fails in the same way: one that was made up is loaded, once nothing else is in the pipeline."""
        if self._rule.in_flight:
            return None
        self._probe = probe_task()
        return self._issuer.load_probe(self._probe)

    def _unload_probe(self) -> Entry:
        self._probe = None
        return self._issuer.unload_probe()

    def _roll_back(self, task: TaskRun, fault: Fault) -> None:
        """Memory ran out for its adapter, which is broken on a stage: it leaves, and comes back as above, but goes on from
        the newest checkpoint that there is already."""
        self._trials.drop(task.uid)
        self._evictions.evict(task, fault)
        task.roll_back()

    def _narrow(self, task: TaskRun, tokens: int) -> None:
        log.warning(
            "microbatches of %s are limited to %d tokens from now on",
            task.name,
            tokens,
            extra=fields_of(task.plan),
        )
        self._rule.limit(task.uid, tokens)

    def _fail(self, task: TaskRun, fault: Fault) -> None:
        self._trials.drop(task.uid)
        reason = FailureReason.OUT_OF_MEMORY if fault.out_of_memory else FailureReason.INTERNAL_ERROR
        message = explain(fault, task.flight.step.step if task.flight.step else task.progress.step)
        log.warning("%s failed: %s", task.name, message, extra=fields_of(task.plan))
        task.fail(reason, message)

    def _wind_down(self) -> Entry | None:
        for task in self._inside:
            if task.unsaved and task.checkpoint.snapshot is None and self._rule.is_idle(task.uid):
                return self._issuer.checkpoint(task)
        for task in self._inside:
            if task.at_end and not task.unsaved and self._rule.is_idle(task.uid):
                return self._issuer.save(task)
        parts = self._rule.next(self._row_lengths, lambda _: False)  # the rest of a step that has begun
        if parts is not None:
            return self._train(parts)
        if self._stopped or self._rule.in_flight or any(task.is_in_hand for task in self._tasks.values()):
            return None
        self._stopped = True
        return self._issuer.stop()

    def _is_at_hand(self, task: TaskRun) -> bool:
        """It has nothing to be taken up, or that is here. If it is not, it is asked for."""
        if not task.checkpoint.resumable or task.checkpoint.restoration is not None:
            return True
        if not task.fetching and self._on_wanted is not None:
            task.fetching = True
            self._on_wanted(task)
        return False

    def _unload(self, task: TaskRun) -> Entry:
        self._rule.leave(task.uid)
        self._trials.drop(task.uid)
        self._judge()
        self._references.leave(task)
        return self._issuer.unload(task)

    def _row_lengths(self, uid: str) -> list[int]:
        task = self._run(uid)
        assert task.prepared is not None
        return [len(task.prepared.rows[row].ids) for row in task.begin_step().rows]

    def _train(self, parts: tuple[Part, ...]) -> Entry:
        item, entry = self._issuer.train(parts, self._run)
        self._trains[item.number] = item
        self.concurrent_tasks = max(self.concurrent_tasks, self._rule.in_flight)
        self._evaluated_last = False
        return entry

    def _evaluate(self) -> Entry | None:
        entry = self._evaluations.next() or self._divergences.next() or self._references.next()
        self._evaluated_last |= entry is not None
        return entry
