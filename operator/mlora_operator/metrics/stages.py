"""Predicted and used memory of a pipeline's stages. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from mlora_operator.reconcile.admission.capacity import memory_model
from mlora_operator.reconcile.admission.pipeline_view import PipelineView


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes. ``budget``: that may be used; ``predicted``: for the tasks in training; ``used``: at most, by the samples that
    the workers report, 0 where nothing is known."""

    stage: int
    budget: int
    predicted: int
    used: int


def stage_memory(view: PipelineView) -> tuple[StageMemory, ...]:
    """Of the tasks of ``view``, all of which train; none while the model's shape is not known."""
    model = memory_model(view)
    if model is None:
        return ()
    used = [0] * len(model.stages)
    if view.report is not None:
        for sample in view.report.memory:
            if sample.stage < len(used) and not sample.calibration:
                used[sample.stage] = max(used[sample.stage], sample.used_bytes)
    checks = model.by_stage(task.uid for task in view.tasks)
    return tuple(StageMemory(check.stage, check.budget, check.needed, used[check.stage]) for check in checks)
