"""One pipeline with all that belongs to it, as the parts of a decision see it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import cached_property, partial

from mlora_operator.api import conditions
from mlora_operator.api.pipeline import LoRAPipelineSpec
from mlora_operator.api.units import parse_duration
from mlora_operator.manifests.statefulset import lineage
from mlora_operator.reconcile.state.cause import Cause
from mlora_operator.reconcile.state.decode import parse_time
from mlora_operator.reconcile.state.endpoint_policy import forbidden_model
from mlora_operator.reconcile.state.isolation import Isolation
from mlora_operator.reconcile.state.plan_refusal import PlanRefusal
from mlora_operator.reconcile.state.references import keys_of_pipeline, secret_problem
from mlora_operator.reconcile.state.serving import claims_in_vain
from mlora_operator.reconcile.state.snapshot import (
    CertificateEnd,
    Contact,
    Key,
    Pipeline,
    ServedTokens,
    Snapshot,
    Task,
    WorkerGroup,
    condition,
)
from mlora_operator.rights import Rights
from mlora_worker.protocol import ModelFacts, Report, StageReport, TaskReport

# A store may refuse for so long what a task has done before workers that are to be replaced are replaced all the same.
STORE_PATIENCE = timedelta(hours=1)
WORKERS_REFUSED = "WorkersRefused"


@dataclass(frozen=True)
class PipelineView:
    pipeline: Pipeline
    tasks: tuple[Task, ...]  # accepted here and unfinished
    group: WorkerGroup | None
    contact: Contact = field(default_factory=Contact)
    revision: str | None = None  # that the workers shall have
    members: int | None = None  # of a pipeline with replicas, itself included
    image: str | None = None  # of the workers
    refused: str | None = None  # why the API server takes no such workers
    past: tuple[Task, ...] = ()  # finished here; known where the scheduling policy looks back
    deleted: tuple[ServedTokens, ...] = ()  # what tasks that are deleted were served here
    blocked: Cause | None = None  # why workers may not start: the model's address, or the Secret of its store
    rolls: bool = (
        False  # its workers are replaced though tasks train: others have waited for that long enough
    )
    stuck: frozenset[str] = frozenset()  # uids of those whose store has refused what is left of them for long
    unjudged: frozenset[str] = frozenset()  # uids of tasks that nobody has looked into yet (``spec_checks``)
    serves_others: bool = False  # its namespace has the right to
    certificate: CertificateEnd | None = None  # by which its coordinator proves itself
    claims_in_vain: str | None = None  # why it serves its own namespace alone though it says otherwise

    def may_have_keys_of(self, task: Task) -> bool:
        """A task that was here before the right was taken away trains on with the keys that it has."""
        return self.serves_others or task.key.namespace == self.pipeline.key.namespace

    @property
    def report(self) -> Report | None:
        """What the coordinator says of now; None while it does not answer."""
        return self.contact.live

    @property
    def refusal(self) -> PlanRefusal | None:
        """What the workers that answer now do not understand of plans."""
        refused = self.contact.refused
        same = refused is not None and self.report is not None and refused.run == self.report.run_id
        return refused if same else None

    @property
    def present_report(self) -> Report | None:
        """The report of workers that have the present configuration, all of them."""
        return None if self.stale else self.report

    def reported(self, task: Task) -> TaskReport | None:
        return self.contact.tasks.get(task.uid) if self.report is not None else None

    @cached_property
    def active(self) -> frozenset[str]:
        """The uids of the tasks that train or save, as far as is known."""
        return frozenset(task.uid for task in self.tasks if self.contact.trains(task))

    @property
    def in_use(self) -> bool:
        """Tasks train and the group is whole. A coordinator that does not answer for a moment changes
        nothing. A store that refuses one task's work does not hold all others up for ever.
        """
        whole = self.group is not None and self.group.ready >= self.group.replicas > 0
        return whole and not self.active <= self.stuck

    @cached_property
    def stale(self) -> bool:
        """Workers were started with another configuration than the pipeline has now, those that are ending with them."""
        if self.group is None:
            return False
        former = self.group.replicas > 0 and self.group.revision != self.revision
        return former or any(pod.revision != self.revision for pod in self.group.pods)

    @property
    def draining(self) -> bool:
        """Stale workers that are still in use: they finish what they train, unless that keeps others waiting for long."""
        return self.stale and self.in_use and not self.rolls

    @property
    def pod_problem(self) -> Cause | None:
        """The first reason why the group is not complete, in the words of the kubelet, a controller or the API server."""
        if self.refused is not None:
            words = f"the API server rejected its StatefulSet, and the operator tries again: {self.refused}"
            return Cause(WORKERS_REFUSED, words)
        if self.group is None or self.group.replicas == 0:
            return None
        for pod in self.group.pods:
            if pod.problem is not None and not pod.deleting:
                message = f"pod {pod.key.name}: {pod.problem}"
                return Cause(pod.problem.reason, message)
        return self.group.problem

    @cached_property
    def shape(self) -> tuple[ModelFacts, tuple[StageReport, ...]] | None:
        """The model's shape and the stages, from the workers now or as they were last seen. What workers of a former
        configuration say is no word about the present model: who is judged by it may be refused for good.
        """
        assert self.pipeline.spec is not None
        report, status = self.present_report, self.pipeline.status
        if report is not None and report.facts is not None:
            facts, stages = report.facts, report.stages
        elif (
            status.facts is not None
            and status.observed_generation == self.pipeline.generation
            and _tells_of_experts(status.facts)
        ):
            facts, stages = status.facts, status.stages
        else:
            return None
        return (facts, stages) if _are_all(stages, self.pipeline.spec.stages) else None

    @cached_property
    def odd_stages(self) -> str | None:
        """What workers that have loaded the model say of their stages where the pipeline has others, and what to do."""
        assert self.pipeline.spec is not None
        report, wanted = self.present_report, self.pipeline.spec.stages
        if report is None or report.facts is None or _are_all(report.stages, wanted):
            return None
        told = ", ".join(str(one.stage) for one in report.stages[:8]) or "none"
        more = ", ..." if len(report.stages) > 8 else ""
        return (
            f"its workers report the stages {told}{more}, but spec.stages is {wanted}, so those are wanted "
            "from 0 on, each once: no task can be admitted. Delete the pods of its workers; if the new "
            "ones report the same, worker.image does not go with this operator"
        )


def _tells_of_experts(facts: ModelFacts) -> bool:
    """Workers before report format 11 did not say where a model's experts are, and those that come now do."""
    return all(shape.path is not None for shape in facts.experts or ())


def _are_all(stages: Sequence[StageReport], count: int) -> bool:
    """Each once, in their order."""
    return [one.stage for one in stages] == list(range(count))


class PipelineViews:
    """Of the pipelines of one snapshot: each is looked at once, however many parts of a pass ask, each for its own tasks.

    ``any_address``: a model may lie also where only the worker can reach. ``now`` None: nobody is ``stuck``. ``rights``
    None: of no interest, so that a pipeline has none. ``isolation``: of the pass.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        *,
        any_address: bool = False,
        now: datetime | None = None,
        rights: Rights | None = None,
        isolation: Isolation | None = None,
    ) -> None:
        self.snapshot = snapshot
        self._isolation = isolation or Isolation()
        self._any_address, self._now, self._rights = any_address, now, rights
        self._seen: dict[Key, PipelineView] = {}  # without tasks

    def of(self, pipeline: Pipeline, tasks: tuple[Task, ...]) -> PipelineView:
        seen = self._seen.get(pipeline.key)
        if seen is None:
            seen = self._seen[pipeline.key] = self._look_at(pipeline)
        snapshot, now = self.snapshot, self._now
        return replace(
            seen,
            tasks=tasks,
            past=snapshot.finished.get(str(pipeline.key), ()) if looks_back(pipeline, tasks) else (),
            stuck=frozenset(
                task.uid
                for task in tasks
                if now is not None
                and self._isolation.try_task(task, partial(_is_stuck, task, seen.contact, now), False)
            ),
            unjudged=snapshot.unjudged,
        )

    def _look_at(self, pipeline: Pipeline) -> PipelineView:
        spec, key, snapshot, rights = pipeline.spec, pipeline.key, self.snapshot, self._rights
        group = snapshot.groups.get(key)
        return PipelineView(
            pipeline=pipeline,
            tasks=(),
            members=_members(pipeline, snapshot),
            image=(spec.worker.image if spec is not None else None) or snapshot.worker_image,
            refused=snapshot.refused.get(pipeline.uid),
            deleted=snapshot.deleted.get(str(key), ()),
            group=group,
            contact=snapshot.contacts.get(key, Contact()),
            certificate=snapshot.certificate_ends.get(key),
            revision=snapshot.revisions.get(key),
            blocked=_blocked(pipeline, snapshot, self._any_address),
            rolls=self._now is not None and _rolls(pipeline, group, self._now),
            serves_others=rights is not None and rights.serves_others(key.namespace),
            claims_in_vain=claims_in_vain(pipeline, rights) if rights is not None else None,
        )


def view(pipeline: Pipeline, tasks: tuple[Task, ...], snapshot: Snapshot) -> PipelineView:
    """Of one pipeline alone, for who asks for no more."""
    return PipelineViews(snapshot).of(pipeline, tasks)


def _blocked(pipeline: Pipeline, snapshot: Snapshot, any_address: bool) -> Cause | None:
    """Why its workers may not start. Where they have started, a Secret that cannot be read was there."""
    spec = pipeline.spec
    if spec is None:
        return None
    refused = None if any_address else _refused_model(spec)
    if refused is not None or spec.storage.secret_ref is None:
        return refused
    key = Key(pipeline.key.namespace, spec.storage.secret_ref.name)
    missing = secret_problem(key, snapshot, "spec.storage.secretRef", keys_of_pipeline(spec))
    started = missing is not None and missing.unread and _has_workers(snapshot.groups.get(pipeline.key))
    return None if started else missing


def _rolls(pipeline: Pipeline, group: WorkerGroup | None, now: datetime) -> bool:
    """What the former workers train, the new ones take up from a checkpoint of its last step: nothing is lost but the time
    of a start. Not so where the base model is another one, which refuses all checkpoints.
    """
    spec, since = pipeline.spec, pipeline.status.updating_since
    if spec is None or since is None or group is None:
        return False
    takes_up = all(pod.lineage == lineage(spec) for pod in group.pods)
    return takes_up and now - parse_time(since) >= parse_duration(spec.scheduling.hold_back)


def _is_stuck(task: Task, contact: Contact, now: datetime) -> bool:
    reported = contact.tasks.get(task.uid)
    if reported is None or not reported.waits_for_store:
        return False
    held = condition(task.status.conditions, conditions.UPLOAD_BLOCKED)
    if held is None or held.status != "True":
        return False
    return now - parse_time(held.last_transition_time) >= STORE_PATIENCE


def _has_workers(group: WorkerGroup | None) -> bool:
    return group is not None and group.replicas > 0


def _refused_model(spec: LoRAPipelineSpec) -> Cause | None:
    words = forbidden_model(spec)
    return None if words is None else Cause(conditions.REASON_ENDPOINT_NOT_ALLOWED, words)


def _members(pipeline: Pipeline, snapshot: Snapshot) -> int | None:
    """None for one that has no replicas and may have none."""
    replicas = snapshot.replicas.get(pipeline.key, ())
    may = pipeline.spec is not None and pipeline.spec.replicas.max > 1
    return 1 + len(replicas) if replicas or may else None


def looks_back(pipeline: Pipeline, tasks: Sequence[Task]) -> bool:
    """Its scheduling policy asks what namespaces were served. ``tasks``: its unfinished ones."""
    fair = pipeline.spec is not None and pipeline.spec.scheduling.policy == "fairShare"
    return fair and any(one.key.namespace != tasks[0].key.namespace for one in tasks)
