"""Which pipeline serves a task, if any. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from mlora_operator.api import conditions
from mlora_operator.api.meta import Storage
from mlora_operator.api.pipeline import LoRAPipelineSpec
from mlora_operator.manifests.names import LABEL_LIMIT, catalogue_name, safe_name
from mlora_operator.reconcile.state.serving import CATALOGUE, precedence, standing, takes
from mlora_operator.reconcile.state.snapshot import Contact, Key, Pipeline, SecretData, Snapshot, Task, Text
from mlora_operator.rights import Rights
from mlora_operator.settings import CatalogueModel
from mlora_worker.bounds import MOST_KEY
from mlora_worker.protocol import ConfigMapReference, StorageAccess, TaskPhase

ACCESS_KEY = "AWS_ACCESS_KEY_ID"
HUB_TOKEN = "HF_TOKEN"
SECRET_KEY = "AWS_SECRET_ACCESS_KEY"
SESSION_TOKEN = "AWS_SESSION_TOKEN"
_KEYS = (ACCESS_KEY, SECRET_KEY, SESSION_TOKEN, HUB_TOKEN)
CA_CERTIFICATE = "ca.crt"  # of those who may sign the store's own


@dataclass(frozen=True, slots=True)
class Acceptance:
    """``pipeline`` is set when the task is accepted; ``wanted`` when a pipeline is to be made first; ``held`` when the
    workers that had the task may still train it, or when it is looked at later: nothing is done about it, and its status
    stays as it is.
    """

    reason: str
    message: str
    pipeline: Pipeline | None = None
    wanted: CatalogueModel | None = None
    held: bool = False

    @property
    def unread(self) -> bool:
        """Nobody knows whether the task could be accepted."""
        return self.reason == conditions.REASON_UNREADABLE


Suits = Callable[[Task, Pipeline], bool]  # whether a pipeline could ever train a task


def accept(
    task: Task,
    snapshot: Snapshot,
    catalogue: Sequence[CatalogueModel],
    rights: Rights,
    suits: Suits = lambda *_: True,
) -> Acceptance:
    """Whether and where an unfinished task is served.

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
    serving = [one for one in snapshot.pipelines if _serves(one, task)]
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
        told = f"waits for the workers of {task.status.pipeline}"
        return Acceptance(conditions.REASON_ACCEPTED, told, held=True)
    if task.spec is None:
        return Acceptance(conditions.REASON_INVALID_SPEC, task.problem or "spec is invalid")
    if task.uid in snapshot.wrong:
        return Acceptance(conditions.REASON_INVALID_SPEC, snapshot.wrong[task.uid])
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
        return _unread("spec.baseModel", f"the labels of namespace {own}")
    if makes and offered is not None:
        return Acceptance(
            conditions.REASON_CREATING_PIPELINE,
            f"a pipeline for {offered.name} is being made from the catalogue",
            wanted=offered,
        )
    return _unserved(task, snapshot, catalogue, serving, taken, rights)


def _unserved(
    task: Task,
    snapshot: Snapshot,
    catalogue: Sequence[CatalogueModel],
    serving: Sequence[Pipeline],
    taken: Pipeline | None,
    rights: Rights,
) -> Acceptance:
    """Why nobody serves it, without a word of pipelines that could not. ``taken``: what stands in the catalogue's place."""
    assert task.spec is not None
    own, model = task.key.namespace, task.spec.base_model
    shared = sorted(str(one.key) for one in serving if rights.serves_others(one.key.namespace))
    if shared:
        return Acceptance(
            conditions.REASON_NAMESPACE_NOT_ALLOWED,
            f"{model} is served by {', '.join(shared)}, but not for namespace {own} (spec.allowedNamespaces): "
            "ask the platform team to let it in",
        )
    if taken is not None:
        return Acceptance(
            conditions.REASON_NO_PIPELINE,
            f"the catalogue has {model}, but LoRAPipeline {taken.key}, whose name its pipeline has, "
            f"{_instead(taken)}: ask the platform team to delete or correct it",
        )
    if serving:
        return Acceptance(
            conditions.REASON_NAMESPACE_NOT_ALLOWED,
            f"{model} is served in other namespaces, for their own tasks only: ask the platform team to serve it to "
            f"namespace {own}, too; {_offer(task, snapshot, catalogue, rights)}",
        )
    return Acceptance(
        conditions.REASON_NO_PIPELINE,
        f"no pipeline serves {model} and the operator's catalogue does not have it; "
        f"{_offer(task, snapshot, catalogue, rights)}",
    )


def _with_its_name(model: CatalogueModel, namespace: str, snapshot: Snapshot) -> Pipeline | None:
    """What stands where the catalogue's pipeline would be made; one that is being deleted does not for long."""
    key = Key(namespace, catalogue_name(model.name))
    return next((one for one in snapshot.pipelines if one.key == key and not one.deleting), None)


def _instead(taken: Pipeline) -> str:
    """What is the matter with one that has the name of the catalogue's, and does not serve its model."""
    if taken.catalogue_hash is None:
        return "is somebody else's"
    if taken.spec is None:
        return "is not understood (its condition Ready says why)"
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
    problems = []
    if task.spec.storage.secret_ref is not None and not _is_preempted(task, snapshot, bound):
        key = Key(task.key.namespace, task.spec.storage.secret_ref.name)
        problems.append(secret_problem(key, snapshot, "spec.storage.secretRef"))
    problems.append(_text_problem(task, snapshot))
    return next((one for one in problems if one is not None and not (one.unread and bound)), None)


def _is_preempted(task: Task, snapshot: Snapshot, bound: Pipeline | None) -> bool:
    contact = snapshot.contacts.get(bound.key) if bound is not None else None
    reported = contact.tasks.get(task.uid) if contact is not None else None
    return reported is not None and reported.phase is TaskPhase.PREEMPTED


def _unread(field: str, what: str, cause: str | None = None) -> Acceptance:
    why = f" ({cause})" if cause else ""
    message = f"{field}: the operator cannot read {what} at present{why}; it tries again by itself"
    return Acceptance(conditions.REASON_UNREADABLE, message)


def _unread_object(field: str, kind: str, key: Key, snapshot: Snapshot) -> Acceptance:
    what = f"{kind} {key.name} in namespace {key.namespace}"
    found = _unread(field, what, snapshot.unread.get((kind, key)))
    return replace(found, held=True) if (kind, key) in snapshot.later else found


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
    return contact.told.get(task.uid, False) or (held is not None and held.status == "True")


ConfigMaps = Mapping[Key, Mapping[str, Text] | None]
MOST_TEMPLATE = 4 * 65_536  # bytes: as many characters as dataset.chatTemplate may have


def dataset_text(task: Task, config_maps: ConfigMaps) -> Text | None:
    """The rows that its ConfigMap holds; None where it names none, or that is not there."""
    assert task.spec is not None
    return _text_of(task, task.spec.dataset.config_map_ref, config_maps)


def template_text(task: Task, config_maps: ConfigMaps) -> Text | None:
    """Its chat template, in the same way."""
    assert task.spec is not None
    return _text_of(task, task.spec.dataset.chat_template_ref, config_maps)


def _text_of(task: Task, reference: ConfigMapReference | None, config_maps: ConfigMaps) -> Text | None:
    if reference is None:
        return None
    return (config_maps.get(Key(task.key.namespace, reference.name)) or {}).get(reference.key)


def _text_problem(task: Task, snapshot: Snapshot) -> Acceptance | None:
    """What is wrong with the ConfigMaps of a task's rows and chat template, or None."""
    assert task.spec is not None
    config_maps = snapshot.config_maps
    dataset = task.spec.dataset
    for field, reference, instead in (
        ("configMapRef", dataset.config_map_ref, "dataset.inline or a file"),
        ("chatTemplateRef", dataset.chat_template_ref, "dataset.chatTemplate"),
    ):
        found = _text_of(task, reference, config_maps)
        if found is not None and field == "chatTemplateRef" and found.size > MOST_TEMPLATE:
            return Acceptance(
                conditions.REASON_INVALID_SPEC,
                f"spec.dataset.{field}: the text has {found.size} bytes, and a chat template may have {MOST_TEMPLATE}",
            )
        if reference is None or found is not None:
            continue
        key = Key(task.key.namespace, reference.name)
        if key not in config_maps:
            return _unread_object(f"spec.dataset.{field}", "ConfigMap", key, snapshot)
        there = config_maps[key]
        lacks = (
            f"no ConfigMap {reference.name}"
            if there is None
            else f"ConfigMap {reference.name} has no text under the key {reference.key}"
        )
        return Acceptance(
            conditions.REASON_CONFIG_MAP_NOT_FOUND,
            f"spec.dataset.{field}: {lacks} in namespace {task.key.namespace}; create it, nothing else has to be done "
            f"(`mlora run` reads none: use {instead} there)",
        )
    return None


def keys_of_pipeline(spec: LoRAPipelineSpec) -> tuple[str, ...]:
    """What the Secret of a pipeline has to hold: keys of a store where it has something in one, else the hub's token."""
    remote = spec.model.uri.startswith(("hf://", "http://", "https://"))
    if not remote or (spec.checkpoints.uri or "").startswith("s3://"):
        return (ACCESS_KEY, SECRET_KEY)
    return (HUB_TOKEN,) if spec.model.uri.startswith("hf://") else ()


def secret_problem(
    key: Key,
    snapshot: Snapshot,
    field: str,
    needed: Sequence[str] = (ACCESS_KEY, SECRET_KEY),
) -> Acceptance | None:
    """What is wrong with a Secret, which must hold what is ``needed``, or None; or that it could not be read."""
    if key not in snapshot.secrets:
        return _unread_object(field, "Secret", key, snapshot)
    data = snapshot.secrets[key]
    if data is None:
        return Acceptance(
            conditions.REASON_SECRET_NOT_FOUND,
            f"{field}: no Secret {key.name} in namespace {key.namespace}; create it with "
            f"{' and '.join(needed) or 'what it shall hold'}, nothing else has to be done",
        )
    missing = [name for name in needed if not data.get(name, "").strip()]
    if missing:
        return Acceptance(
            conditions.REASON_SECRET_INCOMPLETE,
            f"{field}: Secret {key.name} in namespace {key.namespace} has no {' and no '.join(missing)}",
        )
    too_long = [name for name in _KEYS if _is_too_long(data.get(name, ""))]
    if too_long:
        return Acceptance(
            conditions.REASON_SECRET_INCOMPLETE,
            f"{field}: in Secret {key.name} in namespace {key.namespace}, {' and '.join(too_long)} must have at most "
            f"{MOST_KEY} characters; put the key alone there",
        )
    return None


def storage_access(
    task: Task, secrets: Mapping[Key, SecretData | None], *, needs_keys: bool = True
) -> StorageAccess | None:
    """The task's store with its keys, white space stripped; None when its Secret is not usable now. Without keys where
    it has none, or with ``needs_keys`` false."""
    assert task.spec is not None
    storage = task.spec.storage
    if storage.secret_ref is None or not needs_keys:
        return access_with(storage, {})
    data = secrets.get(Key(task.key.namespace, storage.secret_ref.name)) or {}
    if not data.get(ACCESS_KEY, "").strip() or not data.get(SECRET_KEY, "").strip():
        return None
    if any(_is_too_long(data.get(name, "")) for name in _KEYS):
        return None
    return access_with(storage, data)


def _is_too_long(key: str) -> bool:
    return len(key.strip()) > MOST_KEY


def access_with(storage: Storage, keys: Mapping[str, str]) -> StorageAccess:
    """A store as a manifest has it, with what a Secret holds, white space stripped; an empty value is none, nor is one
    that is too long to be a key."""
    held = {
        name: value.strip() or None
        for name, value in keys.items()
        if name not in _KEYS or not _is_too_long(value)
    }
    return StorageAccess.model_validate(
        {
            "endpoint": storage.endpoint,
            "region": storage.region,
            "addressing": storage.addressing,
            "checksums": storage.checksums,
            "caCertificate": held.get(CA_CERTIFICATE),
            "accessKey": held.get(ACCESS_KEY),
            "secretKey": held.get(SECRET_KEY),
            "sessionToken": held.get(SESSION_TOKEN),
            "hubToken": held.get(HUB_TOKEN),
        }
    )


def _accepted(pipeline: Pipeline) -> Acceptance:
    return Acceptance(conditions.REASON_ACCEPTED, f"served by pipeline {pipeline.key}", pipeline)


def _serves(pipeline: Pipeline, task: Task) -> bool:
    """Of a task whose spec is not understood it cannot be said which model it wants: it may train in any."""
    if pipeline.spec is None or pipeline.deleting:
        return False
    return task.spec is None or pipeline.spec.model.name == task.spec.base_model


def _offer(task: Task, snapshot: Snapshot, catalogue: Sequence[CatalogueModel], rights: Rights) -> str:
    specs: list[LoRAPipelineSpec] = [
        one.spec
        for one in snapshot.pipelines
        if one.spec is not None and takes(one, task.key.namespace, snapshot.namespace_labels, rights)
    ]
    names = sorted({*(spec.model.name for spec in specs), *(model.name for model in catalogue)})
    if not names:
        return "no base model is served to this namespace yet: ask the platform team for one"
    return f"base models that are served: {', '.join(names)}"
