"""From raw objects to nouns. A spec that does not hold becomes a noun with a problem, never an exception.
Pure.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import datetime
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from mlora_operator.api.meta import NamespacesFrom, timestamp
from mlora_operator.api.meta import parse_time as parse_time  # of objects and statuses
from mlora_operator.api.pipeline import LoRAPipelineSpec
from mlora_operator.api.pipeline_status import PipelineStatus
from mlora_operator.api.problem import describe
from mlora_operator.api.readable import readable
from mlora_operator.api.rule import Rule
from mlora_operator.api.rules import PIPELINE_RULES, TASK_RULES, broken
from mlora_operator.api.spec_size import oversized
from mlora_operator.api.task import LONGEST_RETRY, LoRATaskSpec, TaskStatus
from mlora_operator.manifests.names import CATALOGUE_HASH, REPLICA_HASH, REPLICA_NUMBER, REPLICA_OF, RETRY
from mlora_operator.reconcile.state.decision import DecisionFault
from mlora_operator.reconcile.state.snapshot import Contact, Key, Pipeline, Replica, Task
from mlora_worker.protocol import TaskPhase

Raw = Mapping[str, Any]
Spec = TypeVar("Spec", bound=BaseModel)
Read = TypeVar("Read", Task, Pipeline)

TOO_LARGE = (
    "mlora.dev/too-large"  # in the place of a spec: what is wrong with its size. No spec has such a field
)


def read_task(
    raw: Raw, *, allow_file_uris: bool, before: Task | None = None, unread: str | None = None
) -> Task:
    """A LoRATask. Its rows and its adapter may be files only where user and worker share a disk.

    ``before``: the same object at a former version. Its spec is the same as long as the generation is, and stays the very
    same object then: most versions of a task differ in their status alone. ``unread``: why its spec is not read.
    """
    meta = raw["metadata"]
    if before is not None and before.generation == meta.get("generation", 0) > 0:
        spec, problem = before.spec, before.problem
    elif unread is not None:
        spec, problem = None, unread
    else:
        spec, problem = _spec(LoRATaskSpec, raw, TASK_RULES)
        if spec is not None and not allow_file_uris:
            problem = _file_uris(spec)
            spec = spec if problem is None else None
    return Task(
        key=key_of(raw),
        uid=meta["uid"],
        created=parse_time(meta["creationTimestamp"]),
        generation=meta.get("generation", 0),
        spec=spec,
        problem=problem,
        status=readable(TaskStatus, raw.get("status") or {}),
        deleting="deletionTimestamp" in meta,
        version=meta.get("resourceVersion", ""),
        retry=_retry(meta.get("annotations") or {}),
    )


def _retry(annotations: Mapping[str, str]) -> str | None:
    """As much of the annotation as a status holds of it: the two are compared."""
    value = annotations.get(RETRY)
    return value[:LONGEST_RETRY] if value is not None else None


def read_pipeline(raw: Raw, *, unread: str | None = None) -> Pipeline:
    """A LoRAPipeline. ``unread``: as of a task."""
    meta = raw["metadata"]
    spec, problem = (None, unread) if unread is not None else _spec(LoRAPipelineSpec, raw, PIPELINE_RULES)
    return Pipeline(
        key=key_of(raw),
        uid=meta["uid"],
        created=parse_time(meta["creationTimestamp"]),
        generation=meta.get("generation", 0),
        spec=spec,
        problem=problem,
        status=readable(PipelineStatus, raw.get("status") or {}),
        deleting="deletionTimestamp" in meta,
        version=meta.get("resourceVersion", ""),
        catalogue_hash=meta.get("annotations", {}).get(CATALOGUE_HASH),
        replica=_replica(meta.get("annotations", {})),
    )


def _replica(annotations: Mapping[str, str]) -> Replica | None:
    """None unless all three annotations are as the operator writes them."""
    of, number, made_of = (annotations.get(name, "") for name in (REPLICA_OF, REPLICA_NUMBER, REPLICA_HASH))
    return (
        Replica(of, int(number), made_of) if of and made_of and re.fullmatch("[1-9][0-9]?", number) else None
    )


class Reader:
    """Reads objects, each version of one once: a spec is parsed when it changes, not at every wake.

    What cannot be read stays as it was read last, or is as one whose spec is not understood, or is left out where not even
    that can be; it is among the ``faults`` until these are asked for again.
    """

    def __init__(self, *, allow_file_uris: bool) -> None:
        self._allow_file_uris = allow_file_uris
        self._tasks: dict[str, Task] = {}
        self._pipelines: dict[str, Pipeline] = {}
        self._faults: list[DecisionFault] = []

    def tasks(self, raws: Iterable[Raw]) -> list[Task]:
        return [task for raw in raws if (task := self.task(raw)) is not None]

    def pipelines(self, raws: Iterable[Raw]) -> list[Pipeline]:
        return [pipeline for raw in raws if (pipeline := self.pipeline(raw)) is not None]

    def faults(self) -> tuple[DecisionFault, ...]:
        """Since this was asked last."""
        found, self._faults = tuple(self._faults), []
        return found

    def task(self, raw: Raw) -> Task | None:
        known = self._tasks.get(raw["metadata"]["uid"])
        if known is None or _is_other(known.version, raw):
            try:
                known = read_task(raw, allow_file_uris=self._allow_file_uris, before=known)
            except Exception as error:
                fault = DecisionFault("LoRATask", key_of(raw), raw["metadata"]["uid"], error)
                self._faults.append(fault)
                read = partial(read_task, raw, allow_file_uris=self._allow_file_uris, unread=fault.words)
                return known or _if_readable(read)
            self._tasks[known.uid] = known
        return known

    def pipeline(self, raw: Raw) -> Pipeline | None:
        known = self._pipelines.get(raw["metadata"]["uid"])
        if known is None or _is_other(known.version, raw):
            try:
                known = read_pipeline(raw)
            except Exception as error:
                fault = DecisionFault("LoRAPipeline", key_of(raw), raw["metadata"]["uid"], error)
                self._faults.append(fault)
                return known or _if_readable(partial(read_pipeline, raw, unread=fault.words))
            self._pipelines[known.uid] = known
        return known

    def keep_only(self, uids: Collection[str]) -> None:
        """Forget all others."""
        self._tasks = {uid: task for uid, task in self._tasks.items() if uid in uids}
        self._pipelines = {uid: pipeline for uid, pipeline in self._pipelines.items() if uid in uids}


def _if_readable(read: Callable[[], Read]) -> Read | None:
    try:
        return read()
    except Exception:  # it is among the faults
        return None


def _is_other(version: str, raw: Raw) -> bool:
    """Objects without a resourceVersion are read each time."""
    return not version or version != raw["metadata"].get("resourceVersion")


def config_maps_wanted(
    tasks: Iterable[Task], contacts: Mapping[Key, Contact] = MappingProxyType({})
) -> Mapping[Key, frozenset[str]]:
    """The ConfigMaps that hold rows or chat templates of unfinished tasks, and under which keys. Workers that have prepared
    a task's rows need them no more."""
    prepared = {
        report.uid
        for contact in contacts.values()
        if contact.live is not None
        for report in contact.live.tasks
        if report.phase is not TaskPhase.PREPARING
    }
    wanted: defaultdict[Key, set[str]] = defaultdict(set)
    for task in tasks:
        if task.finished or task.spec is None or task.uid in prepared:
            continue
        for reference in (task.spec.dataset.config_map_ref, task.spec.dataset.chat_template_ref):
            if reference is not None:
                wanted[Key(task.key.namespace, reference.name)].add(reference.key)
    return {key: frozenset(names) for key, names in wanted.items()}


def secrets_wanted(tasks: Iterable[Task], pipelines: Iterable[Pipeline]) -> frozenset[Key]:
    """The Secrets with S3 keys that a decision about these needs; those of finished tasks are nobody's
    business.
    """
    specs = [
        *((task.key.namespace, task.spec) for task in tasks if not task.finished),
        *((pipeline.key.namespace, pipeline.spec) for pipeline in pipelines),
    ]
    return frozenset(
        Key(namespace, spec.storage.secret_ref.name)
        for namespace, spec in specs
        if spec is not None and spec.storage.secret_ref is not None
    )


def namespaces_wanted(tasks: Iterable[Task], pipelines: Iterable[Pipeline]) -> frozenset[str]:
    """The namespaces whose labels a decision needs: those of tasks that some pipeline selects by labels."""
    models = {
        pipeline.spec.model.name
        for pipeline in pipelines
        if pipeline.spec and pipeline.spec.allowed_namespaces.from_ is NamespacesFrom.SELECTOR
    }
    return frozenset(
        task.key.namespace
        for task in tasks
        if task.spec and not task.finished and task.spec.base_model in models
    )


def key_of(raw: Raw) -> Key:
    return Key(raw["metadata"]["namespace"], raw["metadata"]["name"])


def time_or(text: str | None, default: datetime) -> datetime:
    """A time of a status, which anybody may have written who may write statuses; ``default`` for none or nonsense."""
    try:
        return parse_time(text) if text is not None else default
    except (ValueError, OverflowError):
        return default


def not_ahead(text: str | None, now: datetime) -> str | None:
    """A time of a status since which something lasts. One that is still to come was written by a clock that was ahead, and
    nobody shall wait for that: it lasts from now on."""
    return timestamp(now) if text is not None and parse_time(text) > now else text


def _spec(model: type[Spec], raw: Raw, rules: tuple[Rule, ...]) -> tuple[Spec | None, str | None]:
    """The API server has removed the fields that its schema does not know. Those that are left and unknown here are of a
    schema that is newer than this operator, which fills them in even where no user has written them.
    """
    held = raw.get("spec", {})
    if isinstance(held, Mapping) and TOO_LARGE in held:
        return None, f"spec: {held[TOO_LARGE]}"
    try:
        spec = model.model_validate(held, extra="ignore", by_alias=True, by_name=False)
    except ValidationError as error:
        return None, describe(error, "spec")
    document = spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    size = oversized(document)
    if size is not None:
        return None, f"spec: {size}"
    old = tuple(rule for rule in rules if not rule.new_alone)
    problems = [f"{'.'.join(('spec', *path))}: {message}" for path, message in broken(document, old)]
    return (None, "; ".join(problems)) if problems else (spec, None)


def _file_uris(spec: LoRATaskSpec) -> str | None:
    rows = "spec.dataset.uri" if spec.dataset.uri is not None else "spec.dataset.uris"
    uris = [*((rows, uri) for uri in spec.dataset.addresses), ("spec.output.uri", spec.output.uri)]
    if spec.evaluation is not None and spec.evaluation.uri is not None:
        uris.append(("spec.evaluation.uri", spec.evaluation.uri))
    if spec.init_from is not None:
        uris.append(("spec.initFrom.uri", spec.init_from.uri))
    fields = dict.fromkeys(field for field, uri in uris if uri.startswith("file://"))
    if not fields:
        return None
    return f"{' and '.join(fields)}: file:// works with `mlora run` only; use an s3:// URI in a cluster"
