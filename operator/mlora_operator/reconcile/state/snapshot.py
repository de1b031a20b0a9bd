"""What is: everything that a decision may depend on, in frozen nouns. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from hashlib import sha256
from typing import NamedTuple

from pydantic_core import to_json

from mlora_operator.api import conditions
from mlora_operator.api.meta import Condition
from mlora_operator.api.pipeline import LoRAPipelineSpec
from mlora_operator.api.pipeline_status import PipelineStatus
from mlora_operator.api.task import LoRATaskSpec, TaskStatus
from mlora_operator.reconcile.state.cause import Cause
from mlora_operator.reconcile.state.plan_refusal import PlanRefusal
from mlora_operator.scheduling.order import Candidate
from mlora_worker.protocol import Plan, Report, TaskPhase, TaskPlan, TaskReport


class Key(NamedTuple):
    """Namespace and name of an object; its kind is clear from where the key stands. A tuple: each decision looks things up
    by it some ten thousand times."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


def condition(held: tuple[Condition, ...], type_: str) -> Condition | None:
    for one in held:  # asked some twenty times of each task in each pass
        if one.type == type_:
            return one
    return None


def is_true(held: tuple[Condition, ...], type_: str) -> bool:
    found = condition(held, type_)
    return found is not None and found.status == "True"


def has_ended(status: TaskStatus) -> bool:
    return is_true(status.conditions, conditions.SUCCEEDED) or is_true(status.conditions, conditions.FAILED)


@dataclass(frozen=True)
class Task:
    """A LoRATask as it stands. ``spec`` is None when it is wrong; ``problem`` then names the field."""

    key: Key
    uid: str
    created: datetime
    generation: int
    spec: LoRATaskSpec | None
    problem: str | None = None
    status: TaskStatus = field(default_factory=TaskStatus)
    deleting: bool = False
    # resourceVersion. Two versions that say the same are equal: so nothing is worked out anew when a write comes back.
    version: str = field(default="", compare=False)
    retry: str | None = None  # value of the annotation by which a user wants a failed task to run again

    @cached_property
    def finished(self) -> bool:
        """True once the status says so: only then may the coordinator forget the task."""
        return has_ended(self.status)

    # An object is the same as long as it is not written, so what each decision asks of it is worked out once.

    @cached_property
    def candidate(self) -> Candidate:
        priority = self.spec.priority if self.spec is not None else 0
        return Candidate(self.uid, self.key.namespace, self.key.name, priority, self.created)

    @cached_property
    def succeeded(self) -> bool:
        return is_true(self.status.conditions, conditions.SUCCEEDED)

    @cached_property
    def has_deadline(self) -> bool:
        spec = self.spec
        return spec is not None and (
            spec.start_deadline_seconds is not None or spec.active_deadline_seconds is not None
        )

    @cached_property
    def secret(self) -> Key | None:
        """The Secret that it names."""
        reference = self.spec.storage.secret_ref if self.spec is not None else None
        return Key(self.key.namespace, reference.name) if reference is not None else None

    @cached_property
    def accepted(self) -> bool:
        return is_true(self.status.conditions, conditions.ACCEPTED)

    @cached_property
    def admitted(self) -> Condition | None:
        return condition(self.status.conditions, conditions.ADMITTED)


@dataclass(frozen=True, slots=True)
class Replica:
    """What makes a pipeline a replica."""

    of: str  # name of the pipeline in the same namespace whose tasks it shares
    number: int  # from 1
    hash: str  # of the spec that it was given


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A LoRAPipeline as it stands. ``spec`` is None when it is wrong; ``problem`` then names the field."""

    key: Key
    uid: str
    created: datetime
    generation: int
    spec: LoRAPipelineSpec | None
    problem: str | None = None
    status: PipelineStatus = field(default_factory=PipelineStatus)
    deleting: bool = False
    version: str = ""  # resourceVersion
    catalogue_hash: str | None = None  # set when the operator made it from its catalogue
    replica: Replica | None = None  # set when the operator made it to share the tasks of another one

    @property
    def home(self) -> Key:
        """The pipeline that users know: of a replica, the one whose tasks it shares."""
        return self.key if self.replica is None else Key(self.key.namespace, self.replica.of)


@dataclass(frozen=True, slots=True)
class ProcessEnding:
    """How a worker's process ended the last time."""

    code: int
    words: str  # exit code and last lines

    @property
    def is_cause(self) -> bool:
        """Not a rank that only lost its peer, nor one that was asked to end."""
        return self.code not in (0, PEER_LOST, TERMINATED)

    @property
    def is_final(self) -> bool:
        """The worker said that it would end the same way again, whoever starts it."""
        return self.code == CANNOT_SERVE


# Exit codes of mlora_worker, and of a process that SIGTERM ended.
CANNOT_SERVE, PEER_LOST, TERMINATED = 2, 75, 143


@dataclass(frozen=True, slots=True)
class Pod:
    """One worker: a pod, or a local process."""

    key: Key
    uid: str
    revision: str  # of the start configuration that it was made with; see Snapshot.revisions
    ready: bool
    problem: Cause | None = None
    deleting: bool = False
    restarts: int = 0  # how often its process was started again in the same pod
    ended: ProcessEnding | None = None
    ready_since: datetime | None = None
    placed: bool = True  # it has a node
    gone_by: datetime | None = None  # when a pod that is being deleted had to be gone
    lineage: str = ""  # those of the same one take up each other's tasks; see statefulset.lineage
    scheme: str = "http"  # https: it encrypts what its coordinator serves


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """The workers of one pipeline as they are."""

    replicas: int  # asked for
    revision: str
    pods: tuple[Pod, ...] = ()
    problem: Cause | None = None  # why pods cannot even be made, such as a quota
    gone: bool = False  # only pods are left of it
    former: bool = False  # so is the StatefulSet, but of a deleted pipeline of the name: it is about to go
    scheme: str = "http"  # of the coordinator that runs, or else of the one that comes next

    @property
    def ready(self) -> int:
        return sum(pod.ready for pod in self.pods)


class CertificateEnd(NamedTuple):
    """Of the certificate by which a pipeline's coordinator proves itself."""

    at: datetime
    origin: str  # for messages


@dataclass(frozen=True, slots=True)
class ConfigMapText:
    """A text of a ConfigMap: what it is known by, not what it says."""

    digest: str  # SHA-256
    size: int  # bytes
    in_json: int  # bytes, between quotes

    @classmethod
    def of(cls, text: str) -> ConfigMapText:
        body = encoded(text)
        return cls(sha256(body).hexdigest(), len(body), len(to_json(body.decode())))


def encoded(text: str) -> bytes:
    """As it is sent; half a character, which JSON may hold, is sent as a question mark."""
    return text.encode("utf-8", "replace")


class TextDigests(NamedTuple):
    """Digests of what a task's plan took from ConfigMaps."""

    rows: str | None = None
    template: str | None = None


@dataclass(frozen=True)
class Contact:
    """The operator's link to one coordinator."""

    report: Report | None = None  # the last one, also when the link is lost
    lost_since: datetime | None = None  # None while the coordinator answers, or before the first attempt
    error: str | None = None
    starting: bool = False  # it answers, but its stages still load the model
    sent: Plan | None = field(default=None, repr=False)  # last plan that the coordinator took; it holds keys
    # What ConfigMaps held in the last plan of a run of which nothing else is known, by task's uid.
    texts_before: Mapping[str, TextDigests] = field(default_factory=dict, repr=False)
    refused: PlanRefusal | None = None  # what its workers do not understand of plans
    sent_run: str | None = None  # run_id of the coordinator that took it
    sent_sequence: int = -1  # sequence of the last report before that plan was taken
    progressed: datetime | None = None  # when progress was last seen, in whichever run
    still_since: datetime | None = None  # since when the tasks in training stand still; None: nobody trains

    @property
    def live(self) -> Report | None:
        """The report, if it can be trusted to speak of now."""
        return self.report if self.lost_since is None else None

    @cached_property
    def tasks(self) -> Mapping[str, TaskReport]:
        """What was last said of each task, by uid."""
        return {task.uid: task for task in self.report.tasks} if self.report is not None else {}

    @cached_property
    def sent_admissions(self) -> Mapping[str, bool]:
        """Whether the last plan that the coordinator took admits a task, by uid."""
        return {task.uid: task.admitted for task in self.sent.tasks} if self.sent is not None else {}

    @cached_property
    def sent_tasks(self) -> Mapping[str, TaskPlan]:
        """What the last plan that the coordinator took says of each task, by uid."""
        return {task.uid: task for task in self.sent.tasks} if self.sent is not None else {}

    @cached_property
    def texts(self) -> Mapping[str, TextDigests]:
        """What ConfigMaps held when the last plan was sent, by task's uid."""
        plan = self.sent.tasks if self.sent is not None else ()
        return {
            task.uid: TextDigests(task.dataset_digest, task.template_digest) for task in plan if task.digests
        }

    def texts_of(self, task: Task) -> TextDigests:
        """As they were sent first: a ConfigMap that is edited changes no task that has begun, also when its workers were
        started anew since. One that has made no step gets what the ConfigMap holds now.
        """
        before = self.texts_before.get(task.uid) if task.status.step else None
        return self.texts.get(task.uid) or before or TextDigests()

    def trains(self, task: Task) -> bool:
        """The task trains or saves, by the last report; before the first one, by its own status."""
        if self.report is None:
            held = condition(task.status.conditions, conditions.RUNNING)
            return held is not None and held.status != "False"
        reported = self.tasks.get(task.uid)
        return reported is not None and reported.phase in (TaskPhase.TRAINING, TaskPhase.SAVING)

    def keeps(self, task: Task) -> bool:
        """An unfinished task trains, or it has ended by the last report and its status does not say so yet."""
        reported = self.tasks.get(task.uid)
        ended = reported is not None and reported.phase in (TaskPhase.SUCCEEDED, TaskPhase.FAILED)
        return ended or self.trains(task)


SecretData = Mapping[str, str]  # key -> text, decoded


class ServedTokens(NamedTuple):
    """What a task that is deleted was served, evenly from ``start`` to ``end``."""

    namespace: str
    tokens: float
    start: datetime
    end: datetime


@dataclass(frozen=True)
class Snapshot:
    tasks: tuple[Task, ...] = ()
    pipelines: tuple[Pipeline, ...] = ()
    groups: Mapping[Key, WorkerGroup] = field(default_factory=dict)  # by pipeline
    revisions: Mapping[Key, str] = field(
        default_factory=dict
    )  # by pipeline: revision that its workers shall have
    worker_image: str | None = None  # of pipelines that name none
    refused: Mapping[str, str] = field(
        default_factory=dict
    )  # by pipeline's uid: why the API server takes no such workers
    contacts: Mapping[Key, Contact] = field(default_factory=dict)  # by pipeline
    certificate_ends: Mapping[Key, CertificateEnd] = field(
        default_factory=dict
    )  # by pipeline, as far as known
    # Of these three: what could not be read is not in them.
    secrets: Mapping[Key, SecretData | None] = field(
        default_factory=dict, repr=False
    )  # None: looked for, not there
    config_maps: Mapping[Key, Mapping[str, ConfigMapText] | None] = field(
        default_factory=dict
    )  # what of them tasks name, by key; None: looked for, not there
    namespace_labels: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    # By kind and name: why a Secret or a ConfigMap could not be read.
    unread: Mapping[tuple[str, Key], str] = field(default_factory=dict)
    # Uids of tasks whose status was written a moment ago: if they wait in a queue, its words stay as they are.
    recently_written: frozenset[str] = frozenset()
    # Both by ``spec_checks``: uids of tasks that nobody has looked into yet, and what is wrong with patterns of new ones.
    unjudged: frozenset[str] = frozenset()
    texts_kept: frozenset[str] = (
        frozenset()
    )  # digests of texts that the operator has, whatever ConfigMaps hold
    later: frozenset[tuple[str, Key]] = frozenset()  # kind and name of what will be read with a next pass
    wrong: Mapping[str, str] = field(default_factory=dict)
    # By uid of tasks and pipelines: what was raised when they were read.
    faulty: Mapping[str, Exception] = field(default_factory=dict)
    deleted: Mapping[str, tuple[ServedTokens, ...]] = field(default_factory=dict)  # tasks, by pipeline

    @cached_property
    def replicas(self) -> Mapping[Key, tuple[Pipeline, ...]]:
        """Those that are not about to go, by the pipeline whose tasks they share."""
        found: defaultdict[Key, list[Pipeline]] = defaultdict(list)
        for one in self.pipelines:
            if one.replica is not None and not one.deleting:
                found[one.home].append(one)
        return {home: tuple(members) for home, members in found.items()}

    @cached_property
    def finished(self) -> Mapping[str, tuple[Task, ...]]:
        """The finished tasks by the pipeline that their status names: many pipelines ask in one decision."""
        found: defaultdict[str, list[Task]] = defaultdict(list)
        for task in self.tasks:
            if task.finished and task.status.pipeline is not None:
                found[task.status.pipeline].append(task)
        return {pipeline: tuple(tasks) for pipeline, tasks in found.items()}
