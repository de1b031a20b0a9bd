"""Whether a pipeline could ever train a task, and whether it has room for it now. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial

from mlora_operator.memory.scheduler_memory import SchedulerMemory, scheduler_memory
from mlora_operator.reconcile.admission.capacity import memory_model
from mlora_operator.reconcile.admission.pipeline_view import PipelineViews
from mlora_operator.reconcile.state.isolation import Isolation
from mlora_operator.reconcile.state.snapshot import Key, Pipeline, Task


class PipelineMemories:
    """The memory of each pipeline, asked for all unfinished ``tasks`` of its model. Worked out once in a pass, when it is
    first asked for; a task with which it cannot be worked out is isolated."""

    def __init__(
        self, tasks: Sequence[Task], views: PipelineViews, isolation: Isolation | None = None
    ) -> None:
        self.views = views
        self._isolation = isolation or Isolation()
        self._memories: dict[Key, SchedulerMemory | None] = {}
        self._tasks: defaultdict[str, list[Task]] = defaultdict(list)  # by base model
        for task in tasks:
            if task.spec is not None:
                self._tasks[task.spec.base_model].append(task)

    def memory(self, pipeline: Pipeline) -> SchedulerMemory | None:
        """None where the memory is not known."""
        if pipeline.spec is None:
            return None
        if pipeline.key not in self._memories:
            own = self._tasks.get(pipeline.spec.model.name, ())
            self._memories[pipeline.key] = self._of(
                pipeline, [one for one in own if one.key not in self._isolation.tasks]
            )
        return self._memories[pipeline.key]

    def _of(self, pipeline: Pipeline, tasks: Sequence[Task]) -> SchedulerMemory | None:
        def work(some: Sequence[Task]) -> SchedulerMemory | None:
            model = memory_model(self.views.of(pipeline, tuple(some)))
            return scheduler_memory(model) if model is not None else None

        return self._isolation.try_together(tasks, work)

    def suits(self, task: Task, pipeline: Pipeline) -> bool:
        """It is not given up, and the task fits its memory alone, as far as that is known; of an unjudged one it is not.
        What cannot be worked out of the pipeline is not known: that shows where it is decided about."""
        try:
            memory = self.memory(pipeline)
        except Exception:
            return True
        return self._isolation.try_task(task, partial(self._suits, task, pipeline, memory), True)

    @staticmethod
    def _suits(task: Task, pipeline: Pipeline, memory: SchedulerMemory | None) -> bool:
        assert pipeline.spec is not None
        if pipeline.status.given_up is not None and pipeline.spec.replicas.max == 1:
            return False
        return memory is None or task.uid not in memory.numbers or memory.fits_alone(task.uid)


class FreeMemory:
    """Whether a task that waits at one of several pipelines would be admitted at another one. ``placed``: who is, or may
    be, in the memory of which pipeline."""

    def __init__(self, placed: Iterable[tuple[Task, Pipeline]], memories: PipelineMemories) -> None:
        self._memories = memories
        self._inside: defaultdict[Key, list[Task]] = defaultdict(list)
        for task, at in placed:
            if task.spec is not None and not task.spec.suspend:
                self._inside[at.key].append(task)

    def has_room(self, pipeline: Pipeline, task: Task) -> bool:
        """It fits beside all that are there. Not where the memory is not known, or the workers are to be replaced; nor
        where that cannot be worked out: whoever is the cause shows where the pipeline is decided about."""
        try:
            return self._has_room(pipeline, task)
        except Exception:
            return False

    def _has_room(self, pipeline: Pipeline, task: Task) -> bool:
        memory = self._memories.memory(pipeline)
        if pipeline.spec is None or memory is None or task.uid not in memory.numbers:
            return False
        if self._memories.views.of(pipeline, ()).stale:
            return False
        others = [one for one in self._inside[pipeline.key] if one is not task and one.uid in memory.numbers]
        own = sum(one.key.namespace == task.key.namespace for one in others)
        most = pipeline.spec.namespace_limits.training
        if most is not None and own >= most:
            return False
        return memory.fits_beside(memory.held(one.uid for one in others), task.uid)
