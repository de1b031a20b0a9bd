"""The plan for one coordinator, and whether it has to be sent. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from mlora_operator.api.task import LoRATaskSpec
from mlora_operator.reconcile.accept import dataset_text, storage_access, template_text
from mlora_operator.reconcile.answers import Answers
from mlora_operator.reconcile.places import ordered
from mlora_operator.reconcile.snapshot import Key, SecretData, Task
from mlora_operator.reconcile.view import View
from mlora_operator.scheduling.admission import Outcome, Place
from mlora_worker.protocol import Plan, Report, StorageAccess, TaskPhase, TaskPlan


def next_plan(
    view: View,
    wanting: tuple[Task, ...],
    places: Mapping[str, Place],
    secrets: Mapping[Key, SecretData | None],
    config_maps: Mapping[Key, Mapping[str, str] | None],
    made: Answers[TaskPlan],
) -> Plan | None:
    """The plan to send now, or None when the coordinator has it already or cannot take it.

    A task stays in the plan until its status says that it is finished: whoever forgets it earlier could train
    it twice. One that trains and whose spec this operator does not understand is told what it was told last, and as it
    cannot be said which room it leaves, nobody is let in meanwhile, nor put out for another; no plan is made where this
    operator has told it nothing. A suspended one stays as long as the coordinator has
    its steps, so that it can write them down and take them up again. Its keys stay those that were sent last while its
    Secret is missing or cannot be read; an operator that started anew in that time sends none, and the coordinator keeps
    those that it has; one that the coordinator does not have either waits. A pipeline that may not serve a task's namespace
    (any more) is sent no keys of it: the task trains on with those that are there. What ConfigMaps hold
    stays what this operator sent first. Workers that are to be replaced hear of nobody new: they would prepare it in vain,
    and may be too old to understand it. ``made``: plans of tasks, as far as they are known.
    """
    if view.report is None:
        return None
    unread = {task.uid for task in view.tasks if task.spec is None}
    if not unread <= view.contact.sent_tasks.keys():
        return None
    tasks = []
    for task in ordered((*wanting, *_suspended_there(view, wanting))):
        sent = view.contact.sent_tasks.get(task.uid)
        if view.stale and sent is None and view.reported(task) is None:
            continue
        if task.spec is None:
            assert sent is not None
            tasks.append(sent)
            continue
        admitted = (
            _keeps_place(view, task) if unread else _is_admitted(view, places, task) and _is_here(view, task)
        )
        parts = _parts(task, admitted, view, secrets, config_maps)
        known = made.known(task.uid, parts)
        if known is not None:
            tasks.append(known)
            continue
        access = storage_access(task, secrets) if view.may_have_keys_of(task) else None
        if access is not None:
            tasks.append(made.keep(task.uid, parts, _task_plan(task, parts, access)))
            continue
        access = sent.storage if sent is not None else None
        if access is None:
            if view.reported(task) is None:
                continue  # the coordinator does not have it either: there is nothing to lose
            access = storage_access(task, {}, needs_keys=False)
            assert access is not None
        tasks.append(_task_plan(task, parts, access))
    return _if_new(tuple(tasks), view)


class _Parts(NamedTuple):
    """What a task's plan is made of, beside who it is. From one decision to the next most plans are the very same."""

    spec: LoRATaskSpec
    generation: int
    admitted: bool
    started: bool
    keys: SecretData | None
    may_have_keys: bool
    dataset_text: str | None
    template_text: str | None


def _parts(
    task: Task,
    admitted: bool,
    view: View,
    secrets: Mapping[Key, SecretData | None],
    config_maps: Mapping[Key, Mapping[str, str] | None],
) -> _Parts:
    assert task.spec is not None
    texts, may_have_keys = view.contact.texts_of(task), view.may_have_keys_of(task)
    return _Parts(
        task.spec,
        task.generation,
        admitted,
        bool(task.status.step),
        secrets.get(task.secret) if task.secret is not None and may_have_keys else None,
        may_have_keys,
        texts.rows or dataset_text(task, config_maps),
        texts.template or template_text(task, config_maps),
    )


def known_generation(view: View) -> int:
    """The highest generation that was ever seen or sent."""
    contact = view.contact
    return max(
        view.pipeline.status.plan_generation or 0,
        contact.sent.generation if contact.sent is not None else 0,
        contact.report.plan_generation if contact.report is not None else 0,
    )


def _if_new(tasks: tuple[TaskPlan, ...], view: View) -> Plan | None:
    """1. Another wish than the one sent last: the next generation.
    2. The same wish, but the coordinator started anew since, or has not taken it though it reported since:
       again; under the next number when others have counted on in between.
    3. Else nothing.
    """
    contact, report = view.contact, view.report
    assert report is not None
    if contact.sent is None or contact.sent.tasks != tasks:
        return Plan(generation=known_generation(view) + 1, tasks=tasks)
    behind = report.plan_generation < contact.sent.generation
    if behind and (report.run_id != contact.sent_run or report.sequence > contact.sent_sequence):
        known = known_generation(view)
        return contact.sent if contact.sent.generation == known else Plan(generation=known + 1, tasks=tasks)
    # Someone else has sent a plan in between, such as a former operator that was slow to end. Two operators that want the
    # same must not answer each other for ever.
    if report.plan_generation > contact.sent.generation and not _is_done(tasks, report):
        return Plan(generation=known_generation(view) + 1, tasks=tasks)
    return None


def _is_done(tasks: tuple[TaskPlan, ...], report: Report) -> bool:
    """The coordinator has these tasks and no other, and none waits or trains against this wish."""
    phases = {task.uid: task.phase for task in report.tasks}
    if phases.keys() != {task.uid for task in tasks}:
        return False
    against = {True: (TaskPhase.PREPARED, TaskPhase.PREEMPTED), False: (TaskPhase.TRAINING,)}
    return not any(phases[task.uid] in against[task.admitted] for task in tasks)


def _task_plan(task: Task, parts: _Parts, access: StorageAccess) -> TaskPlan:
    spec = parts.spec
    return TaskPlan(
        uid=task.uid,
        namespace=task.key.namespace,
        name=task.key.name,
        generation=parts.generation,
        priority=spec.priority,
        admitted=parts.admitted,
        started=parts.started,
        base_model=spec.base_model,
        lora=spec.lora,
        dataset=spec.dataset,
        dataset_text=parts.dataset_text,
        template_text=parts.template_text,
        training=spec.training,
        evaluation=spec.evaluation,
        init_from=spec.init_from,
        output_uri=spec.output.uri,
        output_dtype=spec.output.dtype,
        base_model_name=spec.output.base_model_name,
        storage=access,
    )


def _is_admitted(view: View, places: Mapping[str, Place], task: Task) -> bool:
    """One that the worker has put out for want of memory is told so first: only then does the worker let it in again."""
    place = places.get(task.uid)
    return place is not None and place.outcome is Outcome.ADMITTED and not _is_put_out(view, task)


def _keeps_place(view: View, task: Task) -> bool:
    """It has the place that it was told of last, and its user has not suspended it."""
    assert task.spec is not None
    told = view.contact.told.get(task.uid, False)
    return told and not task.spec.suspend and not _is_put_out(view, task)


def _is_put_out(view: View, task: Task) -> bool:
    reported = view.reported(task)
    return reported is not None and bool(reported.crowded_out)


def _is_here(view: View, task: Task) -> bool:
    """Pipelines that share tasks let in whom they know to be theirs by its status: so an operator that starts anew never
    takes a task for another's that trains here."""
    if view.members is None and view.pipeline.replica is None:
        return True
    return task.status.pipeline == str(view.pipeline.key) or view.contact.told.get(task.uid, False)


def _suspended_there(view: View, wanting: tuple[Task, ...]) -> tuple[Task, ...]:
    """Suspended tasks that are out of the pipeline, but not forgotten."""
    wanted = {task.uid for task in wanting}
    return tuple(
        task
        for task in view.tasks
        if task.uid not in wanted
        and task.spec is not None
        and task.spec.suspend
        and (reported := view.reported(task)) is not None
        and reported.phase is TaskPhase.PREEMPTED
    )
