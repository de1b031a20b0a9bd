"""How far a task has trained: its steps, their losses, and its evaluations. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from mlora_worker.coordinator.task.evaluation import after
from mlora_worker.coordinator.task.prepared import PreparedTask
from mlora_worker.data.training_rows.learning_rate import learning_rate
from mlora_worker.protocol import Evaluation, EvaluationRecord, StepRecord, TaskPlan
from mlora_worker.storage.artifacts.task_state import EvaluationProgress, SavedProgress


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """A task that starts from the beginning has a new one; each method gives the one that follows."""

    step: int = 0  # steps that are done
    updates: int = 0  # that AdamW has made
    tokens: int = 0
    seconds: float = 0.0  # of training, up to the last returned step
    last: StepRecord | None = None
    evaluated: EvaluationProgress = field(default_factory=EvaluationProgress)

    def after_step(self, record: StepRecord, *, seconds: float) -> TrainingProgress:
        """A step without a supervised token has no loss and makes no update."""
        return replace(
            self,
            step=record.step,
            updates=self.updates + (record.loss is not None),
            tokens=self.tokens + record.tokens,
            seconds=seconds,
            last=record,
        )

    def after_evaluation(self, record: EvaluationRecord, spec: Evaluation) -> TrainingProgress:
        return replace(self, evaluated=after(self.evaluated, record, spec))

    def rolled_back(self, step: int) -> TrainingProgress:
        """The steps after ``step`` are void. The rest is corrected when its checkpoint is loaded."""
        return replace(self, step=step)

    def saved(self, plan: TaskPlan, prepared: PreparedTask) -> SavedProgress:
        """As a checkpoint holds it, once the last update is applied."""
        epoch, epoch_step = divmod(self.step, prepared.steps.steps_per_epoch)
        total = prepared.steps.total_steps
        return SavedProgress(
            step=self.step,
            total_steps=total,
            updates=self.updates,
            epoch=epoch,
            epoch_step=epoch_step,
            learning_rate=learning_rate(self.step, total, plan.training),
            last=self.last,
            tokens=self.tokens,
            seconds=self.seconds,
            evaluation=self.evaluated if prepared.evaluation is not None else None,
            task_uid=plan.uid,
            task=f"{plan.namespace}/{plan.name}",
            fingerprint=dict(prepared.fingerprint),
        )


def progress_of(saved: SavedProgress) -> TrainingProgress:
    """The opposite of ``TrainingProgress.saved``."""
    return TrainingProgress(
        step=saved.step,
        updates=saved.updates,
        tokens=saved.tokens,
        seconds=saved.seconds,
        last=saved.last,
        evaluated=saved.evaluation or EvaluationProgress(),
    )
