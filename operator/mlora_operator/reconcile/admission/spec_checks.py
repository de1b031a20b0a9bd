"""New specs are looked into a few at a time: what a task's names and patterns match, and whether they fit the model. Pure
but for what it remembers.

That takes up to some tens of milliseconds for one spec (``mlora_worker.stream.entries`` has its limits), and there may be
thousands of new ones at once: after a start of the operator, or because somebody wants that. All of them in one decision
would hold up everybody's tasks for minutes. So a decision spends an allowance, those who ask for little go first, and those
who have to wait for the next decision are ``unjudged`` in this one: their status stays as it is, and none of
them is admitted. Who holds memory is always looked into, whatever it takes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from mlora_operator.api.patterns import wrong_patterns
from mlora_operator.reconcile.admission.model_requests import ModelRequests, of_model, text_of
from mlora_operator.reconcile.admission.pipeline_view import PipelineView, PipelineViews
from mlora_operator.reconcile.admission.workload import state_of
from mlora_operator.reconcile.memoize import Memoized
from mlora_operator.reconcile.state.isolation import Isolation
from mlora_operator.reconcile.state.snapshot import Snapshot, Task
from mlora_operator.scheduling.entrant import EntrantState
from mlora_worker.protocol import LoRAConfig

MOST = 100_000_000  # steps for one decision (``entries.MOST_WORK``): some half a second
FOR_A_CHARACTER = 600  # steps that it takes to read a character of a pattern


@dataclass
class SpecChecks:
    """What is remembered from decision to decision, and what is left for this one."""

    most: int = MOST
    left: int = MOST
    wrong: Memoized[str] = field(
        default_factory=Memoized
    )  # what is wrong with the patterns, empty for nothing

    def turn(self) -> None:
        """A decision begins."""
        self.left = self.most
        self.wrong.turn()


def looked_into(
    views: PipelineViews, tasks: Sequence[Task], checks: SpecChecks, isolation: Isolation
) -> Snapshot:
    """Their snapshot, with what is wrong with patterns of new tasks (``wrong``), and the tasks that nobody has looked into
    yet (``unjudged``).

    1. Of each pipeline whose model is known: what its model has of the names and patterns of all tasks for it.
    2. Of tasks that are not accepted yet: whether any model could be asked for their patterns.
    3. Each pipeline may spend half of what those before it have left, and looks into one spec at least.

    One that cannot be looked into is isolated.
    """
    snapshot = views.snapshot
    tasks = isolation.without(tasks, lambda task: text_of(task.spec.lora) if task.spec is not None else 0)
    by_model: defaultdict[str, list[Task]] = defaultdict(list)
    for task in tasks:
        if task.spec is not None:
            by_model[task.spec.base_model].append(task)
    serving: defaultdict[str, list[PipelineView]] = defaultdict(list)
    for pipeline in snapshot.pipelines:
        name = pipeline.spec.model.name if pipeline.spec is not None else None
        if name is not None and name in by_model and not pipeline.deleting:
            with suppress(Exception):  # it raises again where the pipeline is decided about
                serving[name].append(views.of(pipeline, tuple(by_model[name])))
    unjudged: set[str] = set()
    for every in serving.values():
        for seen in every:
            with suppress(Exception):  # as above
                if seen.shape is not None:
                    unjudged |= _look_into(seen, every, of_model(seen.shape[0]), checks, isolation)
    wrong, unread = _wrong(tasks, checks, isolation)
    return replace(snapshot, unjudged=frozenset(unjudged | unread), wrong=wrong)


def _look_into(
    seen: PipelineView,
    every: Sequence[PipelineView],
    model: ModelRequests,
    checks: SpecChecks,
    isolation: Isolation,
) -> set[str]:
    """The uids of those who have to wait. ``every``: all that serve the same base model."""

    def learn(task: Task) -> None:
        assert task.spec is not None
        checks.left -= model.learn(task.spec)

    def can_wait(task: Task) -> bool:
        """Else it holds memory, and what it asks is known now, or was before."""
        assert task.spec is not None
        if model.knows(task.spec):
            return False
        holds = True
        with suppress(
            Exception
        ):  # another task may be the cause, which shows where the pipeline is decided about
            holds = any(state_of(one, task) not in (None, EntrantState.WAITING) for one in every)
        if holds:
            learn(task)
        return not holds

    later = [task for task in seen.tasks if isolation.try_task(task, partial(can_wait, task), False)]
    floor, waiting = checks.left // 2, set()
    for number, task in enumerate(_least_first(later)):
        if number and checks.left <= max(0, floor):
            waiting.add(task.uid)
        else:
            isolation.try_task(task, partial(learn, task), None)
    return waiting


def _wrong(
    tasks: Iterable[Task], checks: SpecChecks, isolation: Isolation
) -> tuple[Mapping[str, str], set[str]]:
    """By uid; and who has to wait."""
    wrong, waiting, first = {}, set(), True
    for task in _least_first(task for task in tasks if task.spec is not None and not task.accepted):
        assert task.spec is not None
        lora = task.spec.lora
        told = checks.wrong.known(task.uid, (lora,))
        if told is None:
            if checks.left <= 0 and not first:
                waiting.add(task.uid)
                continue
            words = isolation.try_task(task, partial(_words, lora), "")
            told = checks.wrong.keep(task.uid, (lora,), words) if task.key not in isolation.tasks else ""
            checks.left -= text_of(lora) * FOR_A_CHARACTER
            first = False
        if told:
            wrong[task.uid] = told
    return wrong, waiting


def _words(lora: LoRAConfig) -> str:
    """What is wrong with its patterns; empty for nothing."""
    found = wrong_patterns(lora)
    return f"{'.'.join(('spec', *found[0]))}: {found[1]}" if found is not None else ""


def _least_first(tasks: Iterable[Task]) -> list[Task]:
    return sorted(
        tasks, key=lambda one: (text_of(one.spec.lora) if one.spec is not None else 0, one.candidate.key)
    )
