"""A task's numbers, from what its coordinator reports. Pure."""

from __future__ import annotations

from typing import Any

from mlora_operator.reconcile.state.snapshot import Task
from mlora_worker.protocol import AdapterInfo, TaskReport


def figures(task: Task, reported: TaskReport | None, pipeline: str) -> dict[str, Any]:
    """Numbers as text where they are not whole, so that a status never holds NaN or sixteen digits.

    A restarted worker knows nothing of a task's past before it has read its checkpoint: until it speaks of a step, or of
    the one from which it went on, what was known stays. Counts of rows are of the ``pipeline`` that the status names: they
    show that its workers have prepared the task, and so have written to its output.
    """
    data = task.status.data if task.status.pipeline == pipeline else None
    if reported is None:
        return {"data": data}
    changes: dict[str, Any] = {"data": reported.data or data}
    if reported.checkpoint_step is not None:
        changes["checkpoint_step"] = reported.checkpoint_step
    speed = reported.tokens_per_second
    changes["tokens_per_second"] = None if speed is None else f"{speed:.0f}"
    changes["adapter"] = _served(task, reported.adapter)
    if not reported.step and reported.resumed_step is None and task.status.step:
        return changes
    step = max(reported.step, reported.resumed_step or 0)
    changes |= {"step": step, "resumed_step": reported.resumed_step}
    if reported.total_steps:
        changes |= {"total_steps": reported.total_steps, "progress": f"{step}/{reported.total_steps}"}
    changes["loss"] = None if reported.loss is None else f"{reported.loss:.4f}"
    if reported.preference is not None:
        told = reported.preference
        changes |= {
            name: None if figure is None else f"{figure:.4f}"
            for name, figure in (
                ("reward_margin", told.margin),
                ("reward_accuracy", told.accuracy),
                ("chosen_logps", told.chosen_logps),
                ("rejected_logps", told.rejected_logps),
                ("kl", told.kl),
            )
        }
    if reported.evaluation is not None:
        changes["evaluation_loss"] = f"{reported.evaluation.loss:.4f}"
    if reported.best is not None:
        changes |= {"best_step": reported.best.step, "best_evaluation_loss": f"{reported.best.loss:.4f}"}
    return changes


def _served(task: Task, adapter: AdapterInfo | None) -> AdapterInfo | None:
    """With what follows from the spec alone, whatever a worker says of it: where the adapter lies, and what a server has to
    be told, which coordinators of all versions leave out. A worker that was taken over leads nobody to another's adapter.
    """
    if adapter is None or task.spec is None:
        return None
    return adapter.model_copy(
        update={"uri": task.spec.output.uri, "max_lora_rank": task.spec.lora.served_rank}
    )
