"""The plan for one coordinator, and whether it has to be sent. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from mlora_operator.api.task import LoRATaskSpec
from mlora_operator.reconcile.admission.pipeline_view import PipelineView
from mlora_operator.reconcile.memoize import Memoized
from mlora_operator.reconcile.state.isolation import Isolation
from mlora_operator.reconcile.state.references import dataset_text, storage_access, template_text
from mlora_operator.reconcile.state.snapshot import ConfigMapText, Key, SecretData, Task
from mlora_operator.scheduling.admission import Admission, AdmissionOutcome
from mlora_worker.protocol import Plan, Report, StorageAccess, TaskPhase, TaskPlan

MOST_BYTES = 16 * 2**20  # of a plan as JSON: keys, specs and, for workers of a former version, texts


class Planned(NamedTuple):
    """``plan``: to send now, or None when the coordinator has it already or cannot take it. ``texts``: digests of those to
    send beside it. ``over``: uids of tasks that wait until there is room for them in a plan. ``refused``: by uid, what
    its workers do not understand of tasks that are left out for that. ``refusal``: why they took no such plan before."""

    plan: Plan | None = None
    texts: tuple[str, ...] = ()
    over: frozenset[str] = frozenset()
    size: int = 0  # bytes of the plan as JSON
    refused: Mapping[str, str] = MappingProxyType({})
    refusal: str | None = None


class Counted(NamedTuple):
    """What a plan says of one task, and its bytes as JSON."""

    plan: TaskPlan
    size: int


MOST_COUNTED = 2**52  # plans: one a millisecond for 140,000 years


def next_plan(
    view: PipelineView,
    wanting: tuple[Task, ...],
    order: tuple[Task, ...],
    admissions: Mapping[str, Admission],
    known: Sources,
    made: Memoized[Counted],
    isolation: Isolation,
) -> Planned:
    """What the coordinator is told.

    A task stays in the plan until its status says that it is finished: whoever forgets it earlier could train
    it twice. One that trains and whose spec this operator does not understand is told what it was told last, and as it
    cannot be said which room it leaves, nobody is let in meanwhile, nor put out for another; no plan is made where this
    operator has told it nothing. One that is isolated and does not train keeps what it was told, but for its place.
    A suspended one stays as long as the coordinator has its steps, so that it can write them down and take them up
    again. Its keys stay those that were sent last while its Secret is missing or cannot be read; an operator that started
    anew in that time sends none, and the coordinator keeps those that it has; one that the coordinator does not have
    either waits. A pipeline that may not serve a task's namespace (any more) is sent no keys of it: the task trains on
    with those that are there. What ConfigMaps hold stays what this operator sent first, and is named by its digest: see
    ``_texts``. Workers that are to be replaced hear of nobody new: they would prepare it in vain, and may be too old to
    understand it. A plan has a size: whom the coordinator knows already stays in it, and new ones come in their order, as
    long as there is room.

    ``order``: of all its tasks. ``made``: plans of tasks, as far as they are known. A task of which none can be made is
    isolated: it keeps what it was told last. If that is nothing and it trains, no plan is made.
    """
    if view.report is None:
        return Planned()
    unread = {task.uid for task in view.tasks if task.spec is None}
    anew: dict[str, Counted] = {}  # of those that train and were told nothing yet
    for task in view.tasks:
        if task.uid in unread and task.uid not in view.contact.sent_tasks:
            one = _anew(isolation.whole.get(task.key), view, known, made)
            if one is None:
                return Planned()
            anew[task.uid] = one

    def counted_of(task: Task, sent: TaskPlan | None) -> Counted | None:
        if view.stale and sent is None and view.reported(task) is None:
            return None
        if task.spec is None:
            return _counted(sent) if sent is not None else anew[task.uid]
        admitted = (
            _stays_admitted(view, task)
            if unread
            else _is_admitted(view, admissions, task) and _is_here(view, task)
        )
        return _of_task(task, admitted, sent, view, known, made)

    counted: list[tuple[Counted, bool]] = []  # and whether the coordinator has it
    refusal, refused = view.refusal, dict[str, str]()
    named = {task.uid for task in (*wanting, *_suspended_there(view, wanting))}
    for task in order:
        if task.uid not in named:
            continue
        sent = view.contact.sent_tasks.get(task.uid)
        one = isolation.try_task(task, partial(counted_of, task, sent), None)
        if one is None and task.key in isolation.tasks:
            if sent is None and _holds_steps(view, task):
                return Planned()
            one = _counted(sent) if sent is not None else None
        there = task.uid in view.contact.tasks or sent is not None
        why = refusal.of(one.plan) if one is not None and refusal is not None else None
        if why is not None and (sent is not None or not there):  # else a plan without it would take it away
            refused[task.uid] = why
            one = _counted(sent) if sent is not None else None
        if one is not None:
            counted.append((one, there))
    counted += ((one, True) for one in _set_aside(isolation, named, view))
    tasks, over, size = _within(counted, view, known)
    plan = _if_new(tasks, view)
    whole = refusal.whole if plan is not None and refusal is not None else None
    return Planned(plan, _asked_for(view), over, size, refused, whole)


class Sources(NamedTuple):
    """What plans are made of beside tasks: see ``Snapshot``."""

    secrets: Mapping[Key, SecretData | None]
    config_maps: Mapping[Key, Mapping[str, ConfigMapText] | None]
    texts_kept: frozenset[str]

    def sizes(self) -> Mapping[str, int]:
        """Bytes of texts in JSON, by digest."""
        texts = (text for held in self.config_maps.values() for text in (held or {}).values())
        return {text.digest: text.in_json for text in texts}


def _of_task(
    task: Task,
    admitted: bool,
    sent: TaskPlan | None,
    view: PipelineView,
    known: Sources,
    made: Memoized[Counted],
) -> Counted | None:
    """None for one that cannot be told of, and that the coordinator does not have."""
    parts = _parts(task, admitted, view, known)
    found = made.known(task.uid, parts)
    if found is not None:
        return found
    access = storage_access(task, known.secrets) if view.may_have_keys_of(task) else None
    if access is not None:
        return made.keep(task.uid, parts, _counted(_task_plan(task, parts, access)))
    access = sent.storage if sent is not None else None
    if access is None:
        if view.reported(task) is None:
            return None  # there is nothing to lose
        access = storage_access(task, {}, needs_keys=False)
        assert access is not None
    return _counted(_task_plan(task, parts, access))


def _anew(whole: Task | None, view: PipelineView, known: Sources, made: Memoized[Counted]) -> Counted | None:
    """The plan of one that is isolated and trains, of an operator that has told nobody anything yet."""
    if whole is None or whole.spec is None:
        return None
    try:
        return _of_task(whole, True, None, view, known, made)
    except Exception:  # it is isolated already
        return None


def _holds_steps(view: PipelineView, task: Task) -> bool:
    """The workers have what is nowhere else; a plan that does not list it takes that away."""
    reported = view.reported(task)
    return task.uid in view.active or (reported is not None and reported.waits_for_store)


def _set_aside(isolation: Isolation, named: set[str], view: PipelineView) -> list[Counted]:
    """Of those that are isolated and are out, or not in yet: whoever is not listed loses what the workers have of it."""
    found = []
    for fault in isolation.tasks.values():
        sent, reported = view.contact.sent_tasks.get(fault.uid), view.contact.tasks.get(fault.uid)
        if fault.uid in named or sent is None or reported is None:
            continue
        if reported.phase in (TaskPhase.PREPARING, TaskPhase.PREPARED, TaskPhase.PREEMPTED):
            found.append(_counted(sent.model_copy(update={"admitted": False})))
    return found


def _counted(plan: TaskPlan) -> Counted:
    return Counted(plan, len(Plan(generation=0, tasks=(plan,)).to_json().encode("utf-8", "replace")))


def _within(
    counted: Sequence[tuple[Counted, bool]], view: PipelineView, known: Sources
) -> tuple[tuple[TaskPlan, ...], frozenset[str], int]:
    """The plans of those for whom there is room, in their order; the uids of the others; bytes of the plan."""
    in_plan = _takes_texts_in_plans(view)
    sizes = known.sizes() if in_plan else {}
    left, over = MOST_BYTES, set()
    for one, is_there in sorted(counted, key=lambda each: not each[1]):
        size = one.size
        if in_plan and one.plan.uid not in view.contact.tasks:
            size += sum(sizes.get(digest, 0) for digest in one.plan.digests)
        if size > left and not is_there:
            over.add(one.plan.uid)
        else:
            left -= size
    plans = (one.plan for one, _ in counted)
    return tuple(plan for plan in plans if plan.uid not in over), frozenset(over), MOST_BYTES - left


def _takes_texts_in_plans(view: PipelineView) -> bool:
    """Its workers are of a version that knows of no digests."""
    return view.report is not None and view.report.lacks is None


def _asked_for(view: PipelineView) -> tuple[str, ...]:
    """What the coordinator lacks of texts that it was told of, in its order. Of tasks of other namespaces, nothing that it
    may not have: what it asks for is its own word."""
    report, sent = view.report, view.contact.sent_tasks
    if report is None or not report.lacks:
        return ()
    own = (sent[task.uid] for task in view.tasks if task.uid in sent and view.may_have_keys_of(task))
    named = {digest for plan in own for digest in plan.digests}
    return tuple(digest for digest in report.lacks if digest in named)


class _Parts(NamedTuple):
    """What a task's plan is made of, beside who it is. From one decision to the next most plans are the very same."""

    spec: LoRATaskSpec
    generation: (
        int | None
    )  # None: workers of a former version do not know it, and would refuse the whole plan
    admitted: bool
    started: bool
    keys: SecretData | None
    may_have_keys: bool
    rows: str | None
    template: str | None
    max_positions: int | None  # of the model; None: the workers have not said


def _parts(task: Task, admitted: bool, view: PipelineView, known: Sources) -> _Parts:
    assert task.spec is not None
    may_have_keys = view.may_have_keys_of(task)
    first = view.contact.texts_of(task)
    facts = (view.report.facts if view.report is not None else None) or view.pipeline.status.facts
    return _Parts(
        task.spec,
        None if _takes_texts_in_plans(view) else task.generation,
        admitted,
        bool(task.status.step),
        known.secrets.get(task.secret) if task.secret is not None and may_have_keys else None,
        may_have_keys,
        _digest(first.rows, dataset_text(task, known.config_maps), task, view, known),
        _digest(first.template, template_text(task, known.config_maps), task, view, known),
        facts.max_positions if facts is not None else None,
    )


def _digest(
    first: str | None, now: ConfigMapText | None, task: Task, view: PipelineView, known: Sources
) -> str | None:
    """Of a text of ``task``: what was sent first, as long as the workers have it or it can be had still; else what its
    ConfigMap holds now."""
    if first is None or now is None:
        return first if now is None else now.digest
    report = view.report
    assert report is not None
    there = view.reported(task) is not None if report.lacks is None else first not in report.lacks
    return first if there or first in known.texts_kept else now.digest


def known_generation(view: PipelineView) -> int:
    """The highest generation that was ever seen or sent. One that nobody can have counted up to is no word of anybody:
    believed, it would leave no number for a further plan."""
    contact = view.contact
    reported = contact.report.plan_generation if contact.report is not None else 0
    return max(
        view.pipeline.status.plan_generation or 0,
        contact.sent.generation if contact.sent is not None else 0,
        reported if reported <= MOST_COUNTED else 0,
    )


def _if_new(tasks: tuple[TaskPlan, ...], view: PipelineView) -> Plan | None:
    """1. Another plan than the one sent last: the next generation.
    2. The same plan, but the coordinator started anew since, or has not taken it though it reported since:
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
    """The coordinator has these tasks and no other, and none waits or trains against this plan."""
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
        dataset=spec.dataset.for_plan(),
        dataset_digest=parts.rows,
        template_digest=parts.template,
        training=spec.training.for_model(parts.max_positions),
        evaluation=spec.evaluation,
        init_from=spec.init_from,
        output_uri=spec.output.uri,
        output_dtype=spec.output.dtype,
        output_overwrite=spec.output.overwrite,
        base_model_name=spec.output.base_model_name,
        storage=access,
    )


def _is_admitted(view: PipelineView, admissions: Mapping[str, Admission], task: Task) -> bool:
    """One that the worker has put out for want of memory is told so first: only then does the worker let it in again."""
    admission = admissions.get(task.uid)
    return (
        admission is not None
        and admission.outcome is AdmissionOutcome.ADMITTED
        and not _is_put_out(view, task)
    )


def _stays_admitted(view: PipelineView, task: Task) -> bool:
    """It was admitted by the plan that was sent last, and its user has not suspended it."""
    assert task.spec is not None
    told = view.contact.sent_admissions.get(task.uid, view.contact.sent is None and task.uid in view.active)
    return told and not task.spec.suspend and not _is_put_out(view, task)


def _is_put_out(view: PipelineView, task: Task) -> bool:
    reported = view.reported(task)
    return reported is not None and bool(reported.crowded_out)


def _is_here(view: PipelineView, task: Task) -> bool:
    """Pipelines that share tasks let in whom they know to be theirs by its status: so an operator that starts anew never
    takes a task for another's that trains here."""
    if view.members is None and view.pipeline.replica is None:
        return True
    return task.status.pipeline == str(view.pipeline.key) or view.contact.sent_admissions.get(task.uid, False)


def _suspended_there(view: PipelineView, wanting: tuple[Task, ...]) -> tuple[Task, ...]:
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
