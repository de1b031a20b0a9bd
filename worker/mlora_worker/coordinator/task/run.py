"""What the coordinator knows of one task.

    PREPARING -> PREPARED -> TRAINING -> SAVING -> SUCCEEDED
         |                    |    ^        |
         |    no longer admitted   admitted again
         |                    v    |        |
         |                   PREEMPTED      |
         +--------- any of them -----------+--> FAILED

A task whose finished adapter an earlier run has kept goes from PREPARING to SAVING; one that is published already, to
SUCCEEDED.

A task that is no longer admitted leaves the stream behind a checkpoint, and is PREEMPTED once that is in the store; until
then it is TRAINING without being in the stream. One that has made no step yet is PREPARED again.

All fields are read and written with the coordinator's lock held.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from mlora_worker.bounds import is_within
from mlora_worker.coordinator.task.evaluation import Assessment, Best, after
from mlora_worker.coordinator.task.history import History
from mlora_worker.coordinator.task.outcome import Outcome, Snapshot
from mlora_worker.coordinator.task.prepared import PreparedTask, Restoration
from mlora_worker.coordinator.task.step import StepInFlight
from mlora_worker.data.training_rows.learning_rate import learning_rate
from mlora_worker.data.training_rows.row_weights import relative_weights, weighted_sum
from mlora_worker.protocol import (
    AdapterInfo,
    DataCounts,
    Failure,
    FailureReason,
    StepRecord,
    TaskPhase,
    TaskPlan,
    TaskReport,
    without_keys,
)
from mlora_worker.storage.artifacts.adapter import FinishedAdapter
from mlora_worker.storage.artifacts.task_state import EvaluationProgress, Progress, TaskState
from mlora_worker.stream.items import Update

_LONGEST_MESSAGE = 2048  # characters
_LONGEST_TEXT = 16 * _LONGEST_MESSAGE  # that keys are looked for in


@dataclass(slots=True)
class TaskRun:
    plan: TaskPlan
    phase: TaskPhase = TaskPhase.PREPARING
    prepared: PreparedTask | None = None
    in_stream: bool = False  # its Load was issued, its Unload was not
    withdrawn: bool = False  # the plan lists it no longer
    steps_done: int = 0
    in_flight: StepInFlight | None = None
    update: Update | None = None  # closes the last returned step; rides with the next item
    discard: bool = False  # its step is issued again; the word rides with the next segment
    load_number: int = 0  # of the item that brought it into the stream
    last: StepRecord | None = None
    tokens_done: int = 0
    started: float | None = None  # monotonic seconds
    seconds: float = 0.0  # from the start of training to the last returned step
    parts: dict[int, dict[str, Tensor]] = field(default_factory=dict)  # stage -> its tensors of the adapter
    finished_adapter: FinishedAdapter | None = None  # of an earlier run, kept on this rank's volume
    adapter: AdapterInfo | None = None
    failure: Failure | None = None
    updates: int = 0  # that AdamW has made
    seconds_before: float = 0.0  # of training, before it was loaded last
    snapshot: Snapshot | None = None
    state: TaskState | None = None  # its newest checkpoint in memory: in writing, or kept for its return
    writing: bool = False  # a pool works on bringing ``state`` to the store
    taken_step: int = 0  # up to where a checkpoint item was issued, or it was taken up; 0: never
    stored_step: int = 0  # of the newest complete checkpoint in the store; 0: none
    resumed_step: int | None = None
    fetching: bool = False  # a pool makes its restoration
    restoration: Restoration | None = None
    blocked: Failure | None = None
    crowded_out: int = 0  # it leaves, or left, for want of memory beside others; so many were there with it
    # Memory ran out for it although nobody else held any, and no later step has come back since: the steps that it had done
    # by then. Its update, its checkpoint and its adapter come after a step, so the same step once more shows nothing.
    lacked_after: int | None = None
    # It left for want of memory while tasks that are out held so many bytes of this stage: it waits until that is less.
    waits_for: tuple[int, int] | None = None
    evaluated: EvaluationProgress = field(default_factory=EvaluationProgress)
    assessment: Assessment | None = None  # the evaluation that is on its way
    best: Best | None = None  # the adapter to publish, where that is not simply the last one
    keep_is_due: bool = False  # the stages shall send their parts of ``best``
    history: History = field(default_factory=History)
    told: tuple[dict[str, object], TaskReport] | None = None  # its newest report, with what is in it
    broken: bool = False  # what a stage holds of it is not what it should be: it leaves without a checkpoint

    @property
    def uid(self) -> str:
        return self.plan.uid

    @property
    def name(self) -> str:
        return f"{self.plan.namespace}/{self.plan.name}"

    @property
    def total_steps(self) -> int:
        if self.prepared is None:
            return self.finished_adapter.step if self.finished_adapter else 0
        return self.prepared.steps.total_steps

    @property
    def finished(self) -> bool:
        return self.phase in (TaskPhase.SUCCEEDED, TaskPhase.FAILED)

    @property
    def at_end(self) -> bool:
        """It has done all its steps, or those that do it good, and is to be saved."""
        done = self.steps_done >= self.total_steps or self.evaluated.stopped
        return self.in_stream and self.phase is TaskPhase.TRAINING and done and not self.is_evaluating

    @property
    def is_evaluating(self) -> bool:
        """An evaluation, or what follows from it at once, comes before its next step."""
        return self.assessment is not None or self.evaluation_is_due or self.keep_is_due

    @property
    def evaluation_is_due(self) -> bool:
        if self.prepared is None or self.prepared.evaluation is None or self.in_flight is not None:
            return False
        ready = self.in_stream and self.phase is TaskPhase.TRAINING and self.assessment is None
        return ready and self.prepared.evaluation.is_due(
            self.steps_done, self.total_steps, self.evaluated.last
        )

    @property
    def unsaved(self) -> bool:
        """It has made steps that no checkpoint holds, and will be wanted again."""
        return (
            self.in_stream
            and self.phase is TaskPhase.TRAINING
            and not self.withdrawn
            and self.steps_done > self.taken_step
        )

    @property
    def checkpoint_is_due(self) -> bool:
        """One at a time: while the former is gathered or written, the next one waits. While the store refuses the former,
        the next one takes its place, so that a rank that ends meanwhile has the newest on its volume."""
        every = self.plan.training.checkpoint_every_steps
        passed = every > 0 and self.steps_done // every > self.taken_step // every
        settled = not self.at_end and not self.is_evaluating
        free = self.snapshot is None and (not self.writing or self.blocked is not None)
        return passed and self.unsaved and settled and free

    @property
    def is_in_hand(self) -> bool:
        """Something of it would be lost if the group ended now: a step on its way, a checkpoint, its adapter."""
        if self.phase is TaskPhase.SAVING:
            return not self.withdrawn
        return self.unsaved or self.snapshot is not None or self.writing

    @property
    def may_load(self) -> bool:
        """It may enter the stream, with its restoration if it has one to wait for."""
        waits = self.phase in (TaskPhase.PREPARED, TaskPhase.PREEMPTED, TaskPhase.TRAINING)
        gathered = self.snapshot is None
        wanted = self.plan.admitted and not self.withdrawn and not self.crowded_out
        return waits and gathered and wanted and not self.in_stream

    @property
    def resumable(self) -> bool:
        """There is a checkpoint from which it goes on."""
        return self.state is not None or self.stored_step > 0

    @property
    def may_step(self) -> bool:
        """It may enter the pipeline with its next step."""
        wants = self.steps_done < self.total_steps and not self.evaluated.stopped
        return self.phase is TaskPhase.TRAINING and not self.leaving and wants and not self.is_evaluating

    @property
    def leaving(self) -> bool:
        """It shall be unloaded as soon as nothing of it is in flight."""
        return self.in_stream and bool(
            self.withdrawn
            or self.phase is not TaskPhase.TRAINING
            or self.broken
            or (
                (not self.plan.admitted or self.crowded_out) and not self.at_end
            )  # what has only to be saved is saved
        )

    def begin_step(self) -> StepInFlight:
        """The next step's rows; asked again before it returned, the same step."""
        if self.in_flight is None:
            assert self.prepared is not None
            step = self.steps_done + 1
            rows = self.prepared.steps.rows_of_step(step)
            held = [self.prepared.rows[row] for row in rows]
            counts = [int(np.count_nonzero(row.labels >= 0)) for row in held]
            weights = relative_weights(held)
            self.in_flight = StepInFlight(
                step=step,
                rows=rows,
                supervised=sum(counts),
                tokens=sum(len(row.ids) for row in held),
                weighted=weighted_sum(counts, weights),
                row_weights=weights,
            )
        return self.in_flight

    def finish_step(self, now: float) -> None:
        """The whole step is back: record it and decide the update. A loss or norm that is not finite fails the task."""
        flight = self.in_flight
        assert flight is not None
        self.in_flight = None
        if self.phase is not TaskPhase.TRAINING:
            return
        loss = flight.loss_sum * flight.weight
        norm = math.sqrt(flight.squared_norm) if flight.squared_norm >= 0 else math.nan
        if not (is_within(loss) and is_within(norm)):
            what = f"loss {loss}" if not is_within(loss) else f"gradient norm {norm}"
            self.fail(
                FailureReason.NON_FINITE_LOSS,
                f"step {flight.step} of {self.total_steps} gave {what}; no adapter was published. "
                "A lower learningRate, more warmupSteps or a maxGradNorm usually helps",
            )
            return
        training = self.plan.training
        rate = learning_rate(flight.step, self.total_steps, training)
        trains = (
            flight.supervised > 0
        )  # a step without a supervised token adds nothing and does not move the adapter
        if trains:
            clip = min(1.0, training.max_grad_norm / (norm + 1e-6)) if training.max_grad_norm > 0 else 1.0
            self.update = Update(step=flight.step, learning_rate=rate, clip=clip)
            self.updates += 1
        self.steps_done = flight.step
        if self.lacked_after is not None and self.steps_done > self.lacked_after:
            self.lacked_after = None
        self.tokens_done += flight.tokens
        self.seconds = self.seconds_before + now - (self.started if self.started is not None else now)
        self.last = StepRecord(
            step=flight.step,
            loss=loss if trains else None,
            learning_rate=rate,
            grad_norm=norm if trains else None,
            tokens=flight.tokens,
        )
        self.history.add_step(self.last)

    def finish_evaluation(self) -> None:
        """All its microbatches are back. A loss that is not finite fails the task."""
        assert self.prepared is not None
        assert self.prepared.evaluation is not None
        assert self.assessment is not None
        record, step, self.assessment = self.assessment.record(), self.assessment.step, None
        if record is None:
            self.fail(
                FailureReason.NON_FINITE_LOSS,
                f"the evaluation after step {step} of {self.total_steps} gave a loss that is not a finite number; no "
                f"adapter was published"
                ". A lower learningRate, more warmupSteps or a maxGradNorm usually helps",
            )
            return
        spec, former = self.prepared.evaluation.spec, self.evaluated.best
        self.evaluated = after(self.evaluated, record, spec)
        self.history.add_evaluation(record)
        self.keep_is_due = spec.keep_best and self.evaluated.best != former

    def outcome(self) -> Outcome:
        """Of ``best`` where that is kept, else of the last step."""
        evaluation, step = self.evaluated.last, self.steps_done
        if self.best is not None:
            evaluation, step = self.best.record, self.best.record.step
        elif evaluation is not None and evaluation.step != step:
            evaluation = None
        return Outcome(step, self.last, self.updates, evaluation, self.history.lines())

    def repeat_step(self) -> None:
        """The step came back void: the same rows again. The update before it was applied, so this alone is discarded."""
        flight = self.in_flight
        assert flight is not None
        self.in_flight = StepInFlight(
            flight.step, flight.rows, flight.supervised, flight.tokens, flight.weighted, flight.row_weights
        )
        self.discard = True

    def progress(self) -> Progress:
        """Where it stands once its last update is applied."""
        assert self.prepared is not None
        epoch, epoch_step = divmod(self.steps_done, self.prepared.steps.steps_per_epoch)
        return Progress(
            step=self.steps_done,
            total_steps=self.total_steps,
            updates=self.updates,
            epoch=epoch,
            epoch_step=epoch_step,
            learning_rate=learning_rate(self.steps_done, self.total_steps, self.plan.training),
            last=self.last,
            tokens=self.tokens_done,
            seconds=self.seconds,
            evaluation=self.evaluated if self.prepared.evaluation is not None else None,
            task_uid=self.uid,
            task=self.name,
            fingerprint=dict(self.prepared.fingerprint),
        )

    def resume(self, restoration: Restoration) -> None:
        """It is in the stream again, as ``restoration`` says."""
        progress = restoration.progress
        self.evaluated = progress.evaluation or EvaluationProgress()
        self.best, self.history = None, restoration.history
        if restoration.best and self.evaluated.best is not None:
            self.best = Best(0, self.evaluated.best, {0: dict(restoration.best)})
        self.steps_done = self.taken_step = self.resumed_step = progress.step
        self.updates, self.tokens_done = progress.updates, progress.tokens
        self.seconds = self.seconds_before = progress.seconds
        self.last = progress.last

    def step_out(self) -> None:
        """It left the stream before its end, with all its steps in a checkpoint, if it has made any."""
        self.discard = self.broken = self.keep_is_due = False
        self.in_flight = self.update = self.started = self.assessment = None
        self.parts = {}
        if self.steps_done == 0:
            self.restart()
        else:
            self.note_stored()

    def roll_back(self) -> None:
        """What it has done since its newest checkpoint is void, and nothing of it is in flight. It goes on from there, or
        from its start, once it is loaded anew."""
        if not self.resumable:
            self.restart()
            return
        self.broken = self.in_stream
        in_memory = self.state.progress.step if self.state is not None else 0
        self.steps_done = self.taken_step = max(self.stored_step, in_memory)
        self.phase = TaskPhase.TRAINING
        self.discard = self.keep_is_due = False
        self.in_flight = self.update = self.snapshot = self.assessment = None
        self.parts = {}
        self.note_stored()

    def note_stored(self) -> None:
        """PREEMPTED, where all that it has done is in the store and it is out of the stream."""
        out = self.phase is TaskPhase.TRAINING and not self.in_stream
        if out and self.steps_done > 0 and self.stored_step == self.steps_done:
            self.phase = TaskPhase.PREEMPTED

    def restart(self) -> None:
        """Back to PREPARED: it will train from its start."""
        self.phase = TaskPhase.PREPARED
        self.steps_done = self.tokens_done = self.updates = self.taken_step = self.stored_step = 0
        self.seconds = self.seconds_before = 0.0
        self.discard = False
        self.in_flight = self.update = self.last = self.started = None
        self.snapshot = self.state = self.restoration = self.resumed_step = None
        self.evaluated, self.history = EvaluationProgress(), History()
        self.best, self.assessment, self.keep_is_due = None, None, False
        self.parts = {}

    def fail(self, reason: FailureReason, message: str) -> None:
        self.phase = TaskPhase.FAILED
        self.failure = Failure(reason=reason, message=self._tellable(message))
        self.parts = {}
        self.snapshot = self.state = self.restoration = self.blocked = None
        self.best, self.assessment, self.keep_is_due = None, None, False

    def block(self, reason: FailureReason, message: str) -> None:
        """Something of it cannot be stored at present, and is tried again."""
        self.blocked = Failure(reason=reason, message=self._tellable(message))

    def _tellable(self, message: str) -> str:
        """Without keys, and as text that any reader takes: what a store says may have half a surrogate pair in it."""
        plain = message[:_LONGEST_TEXT].encode("utf-8", "backslashreplace").decode("utf-8")
        return without_keys(plain, self.plan.storage)[:_LONGEST_MESSAGE]

    def finish_with(self, adapter: FinishedAdapter) -> None:
        """An earlier run has done all its steps: it has only to be published."""
        self.phase, self.finished_adapter = TaskPhase.SAVING, adapter
        self.steps_done = self.resumed_step = adapter.step

    @property
    def _counts(self) -> DataCounts | None:
        if self.prepared is None:
            return self.finished_adapter.data if self.finished_adapter else None
        return self.prepared.counts

    def report(self) -> TaskReport:
        """Made anew where something in it has changed: of thousands of tasks that wait, making all took tens of
        milliseconds under the lock."""
        facts: dict[str, object] = {
            "uid": self.uid,
            "phase": self.phase,
            "step": self.steps_done,
            "total_steps": self.total_steps,
            "loss": self.last.loss if self.last else None,
            "evaluation": self.evaluated.last,
            "best": self.evaluated.best,
            "tokens_per_second": self._rate,
            "data": self._counts,
            "adapter": self.adapter,
            "failure": self.failure,
            "checkpoint_step": self.stored_step or None,
            "resumed_step": self.resumed_step,
            "blocked": self.blocked,
            "crowded_out": (bool(self.crowded_out) and not self.in_stream) or None,
            "released": self._is_released or None,
        }
        if self.told is None or self.told[0] != facts:
            self.told = facts, TaskReport.model_validate(facts)
        return self.told[1]

    @property
    def _rate(self) -> float | None:
        """Tokens a second; None where there is no such number."""
        rate = self.tokens_done / self.seconds if self.seconds > 0 else math.inf
        return rate if is_within(rate) else None

    @property
    def _is_released(self) -> bool:
        under_way = self.phase in (TaskPhase.TRAINING, TaskPhase.SAVING)
        return under_way and self.blocked is not None and not self.in_stream
