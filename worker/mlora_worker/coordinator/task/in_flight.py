"""What the stream has of a task between its Load and its Unload, or owes to it."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from mlora_worker.coordinator.task.divergence import DivergenceInFlight
from mlora_worker.coordinator.task.evaluation import EvaluationInFlight
from mlora_worker.coordinator.task.step import StepInFlight
from mlora_worker.stream.items import Update


@dataclass(slots=True)
class InFlight:
    """A task that enters or leaves the stream has a new one."""

    started: float | None = None  # monotonic seconds: when it was loaded
    seconds_before: float = 0.0  # of training, before it was loaded
    step: StepInFlight | None = None
    update: Update | None = None  # closes the last returned step; travels with the next item
    discard: bool = False  # its step is issued again; the next segment says so
    assessment: EvaluationInFlight | None = None  # the evaluation that is in the pipeline
    divergence: DivergenceInFlight | None = (
        None  # of its next step or evaluation, where its objective needs it
    )
    keep_is_due: bool = False  # the stages shall send their parts of the best adapter
    parts: dict[int, dict[str, Tensor]] = field(default_factory=dict)  # stage -> its tensors of the adapter
    refers: bool = (
        False  # with the adapter that it began with, to learn what that thinks of its rows; then it resumes
    )
    broken: bool = False  # a stage holds wrong tensors of it: it leaves without a checkpoint

    def seconds(self, now: float) -> float:
        """Of training, until ``now``."""
        return self.seconds_before + now - (self.started if self.started is not None else now)

    def take_update(self) -> Update | None:
        update, self.update = self.update, None
        return update

    def knows_divergence(self, *, of_evaluation: bool) -> bool:
        found = self.divergence
        return found is not None and found.complete and found.of_evaluation is of_evaluation

    def take_kl(self) -> float | None:
        """None where it is not needed."""
        found, self.divergence = self.divergence, None
        return found.kl if found is not None else None

    def take_discard(self) -> bool:
        discard, self.discard = self.discard, False
        return discard

    def take_parts(self) -> dict[int, dict[str, Tensor]]:
        parts, self.parts = self.parts, {}
        return parts
