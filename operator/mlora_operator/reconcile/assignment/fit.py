"""Whether a pipeline that serves a task's base model could ever train that task. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from mlora_operator.memory.room import ModelRoom, room_of
from mlora_operator.reconcile.admission.capacity import memory_model
from mlora_operator.reconcile.admission.pipeline_view import view
from mlora_operator.reconcile.state.snapshot import Key, Pipeline, Snapshot, Task


class Suitability:
    """Each pipeline's memory is looked at once, when it is first asked for. ``tasks``: that may be asked about."""

    def __init__(self, tasks: Sequence[Task], snapshot: Snapshot) -> None:
        self._tasks, self._snapshot = tuple(tasks), snapshot
        self._rooms: dict[Key, ModelRoom | None] = {}

    def __call__(self, task: Task, pipeline: Pipeline) -> bool:
        """It is not given up, and the task fits its memory alone, as far as that is known; of an unjudged one it is not.
        What cannot be worked out is not known, whoever is the cause: that shows where the pipeline is decided about."""
        try:
            return self._suits(task, pipeline)
        except Exception:
            return True

    def _suits(self, task: Task, pipeline: Pipeline) -> bool:
        assert pipeline.spec is not None
        if pipeline.status.given_up is not None and pipeline.spec.replicas.max == 1:
            return False
        if pipeline.key not in self._rooms:
            name = pipeline.spec.model.name
            own = tuple(one for one in self._tasks if one.spec is not None and one.spec.base_model == name)
            model = memory_model(view(pipeline, own, self._snapshot))
            self._rooms[pipeline.key] = room_of(model) if model is not None else None
        room = self._rooms[pipeline.key]
        return room is None or task.uid not in room.numbers or room.fits_alone(task.uid)
