"""Whether a task that waits at one of several pipelines would get a place at another one. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mlora_operator.memory.room import ModelRoom, room_of
from mlora_operator.reconcile.admission.capacity import memory_model
from mlora_operator.reconcile.admission.pipeline_view import view
from mlora_operator.reconcile.state.snapshot import Key, Pipeline, Snapshot, Task


@dataclass(frozen=True, slots=True)
class _Place:
    """What one pipeline has, and who may be in it."""

    room: ModelRoom
    inside: tuple[Task, ...]
    most: int | None  # tasks of one namespace that may train there at once


class Rooms:
    """Each pipeline is looked at once, when it is first asked for. ``placed``: who is, or may be, in the memory of which
    pipeline."""

    def __init__(
        self, tasks: Sequence[Task], placed: Iterable[tuple[Task, Pipeline]], snapshot: Snapshot
    ) -> None:
        self._tasks, self._placed, self._snapshot = tuple(tasks), tuple(placed), snapshot
        self._known: dict[Key, _Place | None] = {}

    def has_room(self, pipeline: Pipeline, task: Task) -> bool:
        """It fits beside all that are there. Not where the memory is not known, or the workers are to be replaced; nor
        where that cannot be worked out: whoever is the cause shows where the pipeline is decided about."""
        try:
            return self._has_room(pipeline, task)
        except Exception:
            return False

    def _has_room(self, pipeline: Pipeline, task: Task) -> bool:
        if pipeline.key not in self._known:
            self._known[pipeline.key] = self._look_at(pipeline)
        place = self._known[pipeline.key]
        if place is None or task.uid not in place.room.numbers:
            return False
        others = [one for one in place.inside if one is not task]
        own = sum(one.key.namespace == task.key.namespace for one in others)
        if place.most is not None and own >= place.most:
            return False
        return place.room.fits_beside(place.room.held(one.uid for one in others), task.uid)

    def _look_at(self, pipeline: Pipeline) -> _Place | None:
        if pipeline.spec is None:
            return None
        name = pipeline.spec.model.name
        own = tuple(one for one in self._tasks if one.spec is not None and one.spec.base_model == name)
        seen = view(pipeline, own, self._snapshot)
        model = memory_model(seen)
        if model is None or seen.stale:
            return None
        inside = tuple(
            task
            for task, at in self._placed
            if at is pipeline
            and task.uid in model.demands
            and task.spec is not None
            and not task.spec.suspend
        )
        return _Place(room_of(model), inside, pipeline.spec.namespace_limits.training)
