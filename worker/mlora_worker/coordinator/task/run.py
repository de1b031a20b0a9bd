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

Each part of its state is an object of its own, and a reset is a new one: ``progress`` (how far it has trained), ``flight``
(what the stream has of it), ``checkpoint`` (on the way to the store and back), ``eviction`` (it left for want of memory).

All fields are read and written with the coordinator's lock held.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mlora_worker.coordinator.task.checkpoint_state import CheckpointState
from mlora_worker.coordinator.task.evaluation import Best
from mlora_worker.coordinator.task.eviction import Eviction
from mlora_worker.coordinator.task.failure_text import failure_of
from mlora_worker.coordinator.task.history import History
from mlora_worker.coordinator.task.in_flight import InFlight
from mlora_worker.coordinator.task.outcome import TrainingResult
from mlora_worker.coordinator.task.prepared import PreparedTask, Restoration
from mlora_worker.coordinator.task.progress import TrainingProgress, progress_of
from mlora_worker.coordinator.task.references import References
from mlora_worker.coordinator.task.step import StepInFlight, step_of
from mlora_worker.data.training_rows.learning_rate import learning_rate
from mlora_worker.protocol import (
    AdapterInfo,
    Failure,
    FailureReason,
    StepRecord,
    TaskPhase,
    TaskPlan,
    TaskReport,
)
from mlora_worker.storage.artifacts.adapter import FinishedAdapter
from mlora_worker.storage.artifacts.task_state import SavedProgress
from mlora_worker.stream.items import Update

_HINT = "A lower learningRate, more warmupSteps or a maxGradNorm usually helps"


@dataclass(slots=True)
class TaskRun:
    plan: TaskPlan
    phase: TaskPhase = TaskPhase.PREPARING
    prepared: PreparedTask | None = None
    finished_adapter: FinishedAdapter | None = None  # of an earlier run, kept on this rank's volume
    in_stream: bool = False  # its Load was issued, its Unload was not
    load_number: int = 0  # of the item that brought it into the stream
    withdrawn: bool = False  # the plan lists it no longer
    progress: TrainingProgress = field(default_factory=TrainingProgress)
    history: History = field(default_factory=History)
    references: References | None = (
        None  # of a task that compares its rows with a reference, once it was loaded
    )
    best: Best | None = None  # the adapter to publish, where that is not simply the last one
    flight: InFlight = field(default_factory=InFlight)
    checkpoint: CheckpointState = field(default_factory=CheckpointState)
    fetching: bool = False  # a thread makes its restoration
    writing: bool = False  # a thread brings its newest state to the store
    eviction: Eviction | None = None
    # Memory ran out for it although nobody else held any, and no later step has come back since: the steps that it had done
    # by then. Its update, its checkpoint and its adapter come after a step, so the same step once more shows nothing.
    lacked_after: int | None = None
    blocked: Failure | None = None
    adapter: AdapterInfo | None = None
    failure: Failure | None = None
    reported: tuple[dict[str, object], TaskReport] | None = None  # its newest report, with what is in it

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
        done = self.progress.step >= self.total_steps or self.progress.evaluated.stopped
        return self.in_stream and self.phase is TaskPhase.TRAINING and done and not self.is_evaluating

    @property
    def is_evaluating(self) -> bool:
        """An evaluation, or what follows from it at once, comes before its next step."""
        return self.flight.assessment is not None or self.evaluation_is_due or self.flight.keep_is_due

    @property
    def evaluation_is_due(self) -> bool:
        if self.prepared is None or self.prepared.evaluation is None or self.flight.step is not None:
            return False
        ready = self.in_stream and self.phase is TaskPhase.TRAINING and self.flight.assessment is None
        return ready and self.prepared.evaluation.is_due(
            self.progress.step, self.total_steps, self.progress.evaluated.last
        )

    @property
    def unsaved(self) -> bool:
        """It has made steps that no checkpoint holds, and will be wanted again."""
        trains = self.in_stream and self.phase is TaskPhase.TRAINING and not self.withdrawn
        return trains and self.progress.step > self.checkpoint.taken_step

    @property
    def checkpoint_is_due(self) -> bool:
        """One at a time: while the former is gathered or written, the next one waits. While the store refuses the former,
        the next one takes its place, so that a rank that ends meanwhile has the newest on its volume."""
        every = self.plan.training.checkpoint_every_steps
        passed = every > 0 and self.progress.step // every > self.checkpoint.taken_step // every
        settled = not self.at_end and not self.is_evaluating
        free = self.checkpoint.snapshot is None and (not self.writing or self.blocked is not None)
        return passed and self.unsaved and settled and free

    @property
    def is_in_hand(self) -> bool:
        """Something of it would be lost if the group ended now: a step on its way, a checkpoint, its adapter."""
        if self.phase is TaskPhase.SAVING:
            return not self.withdrawn
        return self.unsaved or self.checkpoint.snapshot is not None or self.writing

    @property
    def may_load(self) -> bool:
        """It may enter the stream, with its restoration if it has one to wait for."""
        waits = (
            self.phase in (TaskPhase.PREPARED, TaskPhase.PREEMPTED, TaskPhase.TRAINING) and not self.in_stream
        )
        wanted = self.plan.admitted and not self.withdrawn and self.eviction is None
        return waits and wanted and self.checkpoint.snapshot is None

    @property
    def may_step(self) -> bool:
        """It may enter the pipeline with its next step, or with one that came back void, which has its divergence."""
        waits = self._needs_divergence and self.flight.step is None
        if waits and not self.flight.knows_divergence(of_evaluation=False):
            return False
        return self._next_is_known

    @property
    def may_evaluate(self) -> bool:
        """An evaluation is due, and all that it needs is known."""
        known = not self._needs_divergence or self.flight.knows_divergence(of_evaluation=True)
        return known and self.evaluation_is_due and self._evaluation_is_known

    @property
    def divergence_is_due(self) -> bool:
        """What comes next needs it, and all else that it needs is known."""
        if not self._needs_divergence or self.flight.step is not None:
            return False
        return self._evaluation_is_known if self.evaluation_is_due else self._next_is_known

    @property
    def _needs_divergence(self) -> bool:
        preference = self.plan.training.preference
        return preference is not None and preference.has_divergence

    @property
    def _evaluation_is_known(self) -> bool:
        return self.references is None or self.references.may_evaluate()

    @property
    def _next_is_known(self) -> bool:
        """It wants a further step, whose rows' references are known."""
        wants = self.progress.step < self.total_steps and not self.progress.evaluated.stopped
        free = self.phase is TaskPhase.TRAINING and not self.leaving and wants and not self.is_evaluating
        known = self.references is None or self.references.ready(self.progress.step + 1) if free else False
        return known and not self.flight.refers

    @property
    def leaving(self) -> bool:
        """It shall be unloaded as soon as nothing of it is in flight. What has only to be saved is saved."""
        if not self.in_stream:
            return False
        if self.withdrawn or self.phase is not TaskPhase.TRAINING or self.flight.broken:
            return True
        if self.flight.refers and self.references is not None and self.references.complete:
            return True
        return (not self.plan.admitted or self.eviction is not None) and not self.at_end

    def begin_step(self) -> StepInFlight:
        """The next step's rows; asked again before it returned, the same step."""
        if self.flight.step is None:
            assert self.prepared is not None
            preference = self.plan.training.preference
            kl = self.flight.take_kl()
            self.flight.step = step_of(self.prepared, self.progress.step + 1, preference, kl)
        return self.flight.step

    def finish_step(self, now: float) -> None:
        """The whole step is back: record it and decide the update. A loss or norm that is not finite fails the task."""
        step, self.flight.step = self.flight.step, None
        assert step is not None
        if self.phase is not TaskPhase.TRAINING:
            return
        if step.invalid is not None:
            self.fail(
                FailureReason.NON_FINITE_LOSS,
                f"step {step.step} of {self.total_steps} gave {step.invalid}; no adapter was published. {_HINT}",
            )
            return
        training = self.plan.training
        rate = learning_rate(step.step, self.total_steps, training)
        if step.trains:
            most = training.max_grad_norm
            clip = min(1.0, most / (step.norm + 1e-6)) if most > 0 else 1.0
            self.flight.update = Update(step=step.step, learning_rate=rate, clip=clip)
        record = StepRecord(
            step=step.step,
            loss=step.loss if step.trains else None,
            learning_rate=rate,
            grad_norm=step.norm if step.trains else None,
            tokens=step.tokens,
            preference=step.preference,
        )
        self.progress = self.progress.after_step(record, seconds=self.flight.seconds(now))
        self.history.add_step(record)
        if self.lacked_after is not None and step.step > self.lacked_after:
            self.lacked_after = None

    def finish_evaluation(self) -> None:
        """All its microbatches are back. A loss that is not finite fails the task."""
        assert self.prepared is not None
        assert self.prepared.evaluation is not None
        assessment, self.flight.assessment = self.flight.assessment, None
        assert assessment is not None
        record = assessment.record()
        if record is None:
            self.fail(
                FailureReason.NON_FINITE_LOSS,
                f"the evaluation after step {assessment.step} of {self.total_steps} gave a loss that is not a finite "
                f"number; no adapter was published. {_HINT}",
            )
            return
        spec, former = self.prepared.evaluation.spec, self.progress.evaluated.best
        self.progress = self.progress.after_evaluation(record, spec)
        self.history.add_evaluation(record)
        self.flight.keep_is_due = spec.keep_best and self.progress.evaluated.best != former

    def outcome(self) -> TrainingResult:
        """Of ``best`` where that is kept, else of the last step."""
        evaluation, step = self.progress.evaluated.last, self.progress.step
        if self.best is not None:
            evaluation, step = self.best.record, self.best.record.step
        elif evaluation is not None and evaluation.step != step:
            evaluation = None
        return TrainingResult(
            step, self.progress.last, self.progress.updates, evaluation, self.history.lines()
        )

    def repeat_step(self) -> None:
        """The step came back void: the same rows again. The update before it was applied, so only this is discarded."""
        assert self.flight.step is not None
        self.flight.step, self.flight.discard = self.flight.step.again(), True

    def saved_progress(self) -> SavedProgress:
        """Where it stands once its last update is applied."""
        assert self.prepared is not None
        return self.progress.saved(self.plan, self.prepared)

    def resume(self, restoration: Restoration) -> None:
        """It is in the stream again, as ``restoration`` says."""
        self.progress, self.history = progress_of(restoration.progress), restoration.history
        self.checkpoint = self.checkpoint.resumed(self.progress.step)
        self.flight.seconds_before = self.progress.seconds
        best = self.progress.evaluated.best
        self.best = (
            Best(0, best, {0: dict(restoration.best)}) if restoration.best and best is not None else None
        )

    def step_out(self) -> None:
        """It left the stream before its end, with all its steps in a checkpoint, if it has made any."""
        if self.flight.refers:  # its checkpoint still waits to be taken up
            self.phase, self.flight = TaskPhase.PREPARED, InFlight()
            return
        if self.progress.step == 0:
            self.restart()
            return
        self.flight = InFlight()
        self.note_stored()

    def roll_back(self) -> None:
        """What it has done since its newest checkpoint is void, and nothing of it is in flight. It resumes from there, or
        from its start, at its next Load."""
        if not self.checkpoint.resumable:
            self.restart()
            return
        step = self.checkpoint.newest_step
        self.phase, self.progress = TaskPhase.TRAINING, self.progress.rolled_back(step)
        self.flight, self.checkpoint = InFlight(broken=self.in_stream), self.checkpoint.rolled_back(step)
        self.note_stored()

    def note_stored(self) -> None:
        """PREEMPTED, where all that it has done is in the store and it is out of the stream."""
        out = self.phase is TaskPhase.TRAINING and not self.in_stream
        if out and self.progress.step > 0 and self.checkpoint.stored_step == self.progress.step:
            self.phase = TaskPhase.PREEMPTED

    def restart(self) -> None:
        """Back to PREPARED: it will train from its start."""
        self.phase = TaskPhase.PREPARED
        self.progress, self.history, self.best = TrainingProgress(), History(), None
        self.flight, self.checkpoint = InFlight(), CheckpointState()

    def fail(self, reason: FailureReason, message: str) -> None:
        """Of a step that is in the pipeline the rest still comes back."""
        self.phase, self.failure = TaskPhase.FAILED, failure_of(reason, message, self.plan.storage)
        self.flight, self.checkpoint = InFlight(step=self.flight.step), self.checkpoint.dropped()
        self.best = self.blocked = None

    def publish(self, adapter: AdapterInfo) -> None:
        """``adapter`` is in its store."""
        self.phase, self.adapter, self.checkpoint = TaskPhase.SUCCEEDED, adapter, self.checkpoint.dropped()

    def block(self, reason: FailureReason, message: str) -> None:
        """Something of it cannot be stored at present, and is tried again."""
        self.blocked = failure_of(reason, message, self.plan.storage)

    def finish_with(self, adapter: FinishedAdapter) -> None:
        """An earlier run has done all its steps: it has only to be published."""
        self.phase, self.finished_adapter = TaskPhase.SAVING, adapter
        self.progress, self.checkpoint = TrainingProgress(adapter.step), self.checkpoint.resumed(adapter.step)
