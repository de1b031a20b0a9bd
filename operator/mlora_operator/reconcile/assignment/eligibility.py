"""Which pipeline serves a task, if any. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mlora_operator.api import conditions
from mlora_operator.manifests.names import LABEL_LIMIT, catalogue_name, safe_name
from mlora_operator.reconcile.state.acceptance import Acceptance
from mlora_operator.reconcile.state.cause import Cause
from mlora_operator.reconcile.state.references import is_read_later, secret_problem, text_problem, unread
from mlora_operator.reconcile.state.serving import CATALOGUE, ServedModels, precedence, standing, takes
from mlora_operator.reconcile.state.snapshot import Contact, Key, Pipeline, Snapshot, Task
from mlora_operator.rights import Rights
from mlora_operator.settings import CatalogueModel
from mlora_worker.protocol import TaskPhase

Suits = Callable[[Task, Pipeline], bool]  # whether a pipeline could ever train a task


def accept(
    task: Task,
    snapshot: Snapshot,
    catalogue: Sequence[CatalogueModel],
    rights: Rights,
    suits: Suits = lambda *_: True,
    served: ServedModels | None = None,
) -> Acceptance:
    """Whether and where an unfinished task is served. ``served``: of this snapshot, where many tasks are asked about.

    1. A task that trains, or has just ended, stays where it is as long as its pipeline serves the model: neither a
       Secret that is being replaced, nor a changed rule about namespaces, nor a spec that this version of the operator does
       not understand throws it out. Which pipeline that is, its status says; a pipeline's own word for it counts only
       where it may serve the task's namespace.
    2. One whose pipeline cannot be asked any more, or serves another model now, is not given to others before it is sure
       that the workers there do not train it: there would be two of it, writing to one place.
    3. Its spec must hold, and its Secret must be there with both keys. What cannot be read is not taken for missing: a task
       that is accepted stays so, a new one waits. One that was preempted stays even where its Secret is missing, since its
       steps lie with the workers.
    4. Of the pipelines that serve the base model, may serve the namespace and take it (``takes``): the one it is bound to
       already, else by ``precedence``: its own namespace's, the catalogue's, the operator's, those of namespaces that were
       given the right; of these the oldest, then by name. Replicas do not count: which of them has a task that its user's
       pipeline takes is decided for all tasks together (``replicas``). Before all that, one that ``suits`` the task: so a
       new task passes one that is given up, or whose memory is too small, and one that has made no step leaves it.
    5. The catalogue's pipeline is made where it would go first and is not there, unless another one has its name.
    """
    own = task.key.namespace
    served = served or ServedModels(snapshot.pipelines, snapshot.namespace_labels, rights)
    serving = _serving(task, snapshot, served)
    bound = next((one for one in serving if str(one.key) == task.status.pipeline), None)
    if bound is not None and snapshot.contacts.get(bound.key, Contact()).keeps(task):
        return _accepted(bound)
    # It may train in a replica already though its status could not be written yet.
    for one in serving:
        contact = snapshot.contacts.get(one.key)
        says_so = contact is not None and task.uid in contact.tasks and contact.keeps(task)
        if says_so and rights.may_serve(one.key.namespace, own):
            return _accepted(one)
    if bound is None and _may_train_still(task, snapshot):
        told = f"the task waits for the workers of {task.status.pipeline}"
        return Acceptance(Cause(conditions.REASON_ACCEPTED, told), held=True)
    if task.spec is None:
        return Acceptance(Cause(conditions.REASON_INVALID_SPEC, task.problem or "spec is invalid"))
    if task.uid in snapshot.wrong:
        return Acceptance(Cause(conditions.REASON_INVALID_SPEC, snapshot.wrong[task.uid]))
    if bound is not None and not rights.may_serve(bound.key.namespace, own):
        bound = None
    if bound is not None and bound.replica is not None and not any(one.key == bound.home for one in serving):
        return _accepted(bound)  # nobody can deal it to another replica

    serving = [one for one in serving if one.replica is None]
    home = bound.home if bound is not None else None
    missing = _missing(task, snapshot, bound)
    if missing is not None:
        return missing

    answers = [(one, takes(one, own, snapshot.namespace_labels, rights)) for one in serving]
    allowed = [one for one, does in answers if does or (does is None and one.key == home)]
    chosen = _first_choice(task, allowed, home, snapshot, suits, rights) if allowed else None
    offered = next((model for model in catalogue if model.name == task.spec.base_model), None)
    taken = _with_its_name(offered, rights.namespace, snapshot) if offered is not None else None
    makes = offered is not None and taken is None
    if chosen is not None and not (
        makes and chosen.key != home and standing(chosen, own, rights) > CATALOGUE
    ):
        return _accepted(chosen)
    if chosen is None and any(does is None for _, does in answers):
        return Acceptance(unread("spec.baseModel", f"the labels of namespace {own}"))
    if makes and offered is not None:
        return Acceptance(
            Cause(
                conditions.REASON_CREATING_PIPELINE,
                f"the operator creates a pipeline for {offered.name} from the catalogue",
            ),
            wanted=offered,
        )
    return _unserved(task, catalogue, serving, taken, rights, served)


def _unserved(
    task: Task,
    catalogue: Sequence[CatalogueModel],
    serving: Sequence[Pipeline],
    taken: Pipeline | None,
    rights: Rights,
    served: ServedModels,
) -> Acceptance:
    """Why nobody serves it, without a word of pipelines that could not. ``taken``: what stands in the catalogue's place."""
    assert task.spec is not None
    own, model = task.key.namespace, task.spec.base_model
    shared = sorted(str(one.key) for one in serving if rights.serves_others(one.key.namespace))
    if shared:
        return Acceptance(
            Cause(
                conditions.REASON_NAMESPACE_NOT_ALLOWED,
                f"{model} is served by {', '.join(shared)}, but not for namespace {own} (spec.allowedNamespaces): "
                "ask the platform team to allow it",
            ),
        )
    if taken is not None:
        return Acceptance(
            Cause(
                conditions.REASON_NO_PIPELINE,
                f"the catalogue has {model}, but LoRAPipeline {taken.key}, which has the name of its pipeline, "
                f"{_instead(taken)}: ask the platform team to delete or correct it",
            ),
        )
    if serving:
        return Acceptance(
            Cause(
                conditions.REASON_NAMESPACE_NOT_ALLOWED,
                f"{model} is served in other namespaces for their own tasks only: ask the platform team to "
                f"serve namespace {own} as well; {_offer(task, catalogue, served)}",
            ),
        )
    return Acceptance(
        Cause(
            conditions.REASON_NO_PIPELINE,
            f"no pipeline serves {model} and the operator's catalogue does not have it; "
            f"{_offer(task, catalogue, served)}",
        ),
    )


def _with_its_name(model: CatalogueModel, namespace: str, snapshot: Snapshot) -> Pipeline | None:
    """What stands where the catalogue's pipeline would be made; one that is being deleted does not for long."""
    key = Key(namespace, catalogue_name(model.name))
    return next((one for one in snapshot.pipelines if one.key == key and not one.deleting), None)


def _instead(taken: Pipeline) -> str:
    """What is the matter with one that has the name of the catalogue's, and does not serve its model."""
    if taken.catalogue_hash is None:
        return "was not created by the operator"
    if taken.spec is None:
        return "is invalid (see its condition Ready)"
    return f"serves {taken.spec.model.name} now"


def _may_train_still(task: Task, snapshot: Snapshot) -> bool:
    """Workers of the pipeline that had it are there; and it is deleted or not understood, so that nobody speaks to them, or
    they said last that they train it.
    """
    namespace, _, name = (task.status.pipeline or "").partition("/")
    key = Key(namespace, name)
    group = snapshot.groups.get(key) or snapshot.groups.get(Key(namespace, safe_name(name, LABEL_LIMIT)))
    if group is None or not any(pod.placed for pod in group.pods):
        return False
    pipeline = next((one for one in snapshot.pipelines if one.key == key), None)
    if pipeline is None or pipeline.deleting or pipeline.spec is None:
        return True
    return snapshot.contacts.get(key, Contact()).keeps(task)


def _missing(task: Task, snapshot: Snapshot, bound: Pipeline | None) -> Acceptance | None:
    """What the task names and nobody has, or None."""
    assert task.spec is not None
    problems: list[Cause | None] = []
    if task.spec.storage.secret_ref is not None and not _is_preempted(task, snapshot, bound):
        key = Key(task.key.namespace, task.spec.storage.secret_ref.name)
        problems.append(secret_problem(key, snapshot, "spec.storage.secretRef"))
    problems.append(text_problem(task, snapshot))
    cause = next((one for one in problems if one is not None and not (one.unread and bound)), None)
    if cause is None:
        return None
    return Acceptance(cause, held=cause.unread and is_read_later(task, snapshot))


def _is_preempted(task: Task, snapshot: Snapshot, bound: Pipeline | None) -> bool:
    contact = snapshot.contacts.get(bound.key) if bound is not None else None
    reported = contact.tasks.get(task.uid) if contact is not None else None
    return reported is not None and reported.phase is TaskPhase.PREEMPTED


def _first_choice(
    task: Task,
    allowed: Sequence[Pipeline],
    home: Key | None,
    snapshot: Snapshot,
    suits: Suits,
    rights: Rights,
) -> Pipeline:
    """A pipeline that was given up is forgotten to be so once no task wants it. Its tasks would go to and fro between two
    such, so they leave it only for one whose workers are up."""
    at_home = next((one for one in allowed if one.key == home), None)
    if len(allowed) == 1 or (at_home is not None and _has_begun(task, at_home, snapshot)):
        return at_home or allowed[0]
    fit = {one.key for one in allowed if suits(task, one)}
    if at_home is not None and at_home.key not in fit and at_home.status.given_up is not None:
        fit = {key for key in fit if (live := snapshot.contacts.get(key, Contact()).live) and live.ready}
    return min(
        allowed,
        key=lambda one: (
            one.key not in fit,
            one.key != home,
            *precedence(one, task.key.namespace, rights),
        ),
    )


def _has_begun(task: Task, at: Pipeline, snapshot: Snapshot) -> bool:
    """It has made steps, or workers that are there may begin with it. Of those that end, and of those that were not
    heard yet, nobody can exclude it: they may have it by a former plan, and would write where the next ones do."""
    group = snapshot.groups.get(at.key)
    placed = [pod for pod in group.pods if pod.placed] if group is not None else []
    if task.status.step or not placed:
        return bool(task.status.step)
    contact = snapshot.contacts.get(at.key, Contact())
    if any(pod.deleting or (contact.report is None and pod.ready) for pod in placed):
        return True
    held = task.admitted
    return contact.sent_admissions.get(task.uid, False) or (held is not None and held.status == "True")


def _accepted(pipeline: Pipeline) -> Acceptance:
    return Acceptance(Cause(conditions.REASON_ACCEPTED, f"served by pipeline {pipeline.key}"), pipeline)


def _serving(task: Task, snapshot: Snapshot, served: ServedModels) -> Sequence[Pipeline]:
    """Of a task whose spec is not understood it cannot be said which model it wants: it may train in any that its status
    names, or whose coordinator speaks of it."""
    if task.spec is not None:
        return served.by(task.spec.base_model)
    told = [str(key) for key, contact in snapshot.contacts.items() if task.uid in contact.tasks]
    return served.named(dict.fromkeys((*([task.status.pipeline] if task.status.pipeline else ()), *told)))


def _offer(task: Task, catalogue: Sequence[CatalogueModel], served: ServedModels) -> str:
    names = sorted({*served.models(task.key.namespace), *(model.name for model in catalogue)})
    if not names:
        return "no base model is available in this namespace yet: ask the platform team for one"
    return f"available base models: {', '.join(names)}"
