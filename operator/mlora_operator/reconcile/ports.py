"""What the reconcile loop needs of the world: an API server with nodes, or files with local processes.

Both implementations run the same ``observe``, ``decide`` and ``act``. Every write is idempotent: the loop
repeats it until what it sees is what it wished. A write about an object that is gone raises ``Gone``, which
counts as done.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol

from mlora_operator.reconcile.state.decision import DesiredWorkers, Event, Manifest
from mlora_operator.reconcile.state.snapshot import Contact, Key, Pipeline, Pod, SecretData, Task, WorkerGroup
from mlora_worker.protocol import Plan

ReadText = Callable[[str], Awaitable[str]]  # the text of a digest. Raises texts.TextGone
Raw = Mapping[str, Any]  # an object as the API server gives it: metadata, spec, status


class Gone(Exception):
    """The object of a write is no longer there (or is another one of the same name)."""


class WriteRefused(Exception):
    """What was to be written is wrong, or not allowed, and will be refused again until somebody changes something."""


@dataclass(frozen=True, slots=True)
class CoordinatorTrust:
    """The one certificate that a coordinator may have. Its name is asked for wherever its address leads."""

    host: str
    certificate: str = field(repr=False)  # as PEM
    origin: str  # for messages
    ends: datetime | None = None  # None: not known


@dataclass(frozen=True, slots=True)
class ClusterObjects:
    """What is there now. ``metadata`` of tasks and pipelines needs namespace, name, uid, creationTimestamp;
    generation and resourceVersion where there are any."""

    tasks: Sequence[Raw] = ()
    pipelines: Sequence[Raw] = ()
    groups: Mapping[Key, WorkerGroup] = field(default_factory=dict)  # by pipeline


class Cluster(Protocol):
    # --- what is ---
    def objects(self) -> ClusterObjects:
        """All objects, from memory: no I/O."""

    def revision(self, pipeline: Pipeline) -> str:
        """Identity of the start configuration that the workers shall have. ``pipeline.spec`` is valid."""

    def coordinator_url(self, pipeline: Pipeline, scheme: str) -> str:
        """Where the pipeline's coordinator listens, such as ``http://host:8080``. ``scheme``: of its group."""

    async def read_secret(self, key: Key) -> SecretData | None:
        """The decoded Secret, or None when there is none."""

    async def read_config_map(self, key: Key) -> Mapping[str, str] | None:
        """The ConfigMap's texts, or None when there is none."""

    async def read_token(self, pipeline: Pipeline) -> str | None:
        """The bearer token of the pipeline's coordinator, or None before its workers were first applied."""

    async def read_trust(self, pipeline: Pipeline) -> CoordinatorTrust | None:
        """By what the pipeline's coordinator proves itself when it serves HTTPS, or None when there is nothing yet."""

    async def read_namespace_labels(self, namespace: str) -> Mapping[str, str]:
        """Labels of a namespace; empty when it has none or is gone."""

    # --- what shall be ---
    async def apply_pipeline(self, manifest: Manifest) -> None:
        """Make a LoRAPipeline, or bring it to this manifest."""

    async def delete_pipeline(self, pipeline: Pipeline) -> None:
        """Remove a replica, this very object, with all that belongs to it."""

    async def apply_workers(self, workers: DesiredWorkers) -> None:
        """Make the pipeline's token and certificate (once), and its workers, or bring them to this number.
        Raises Refused."""

    async def delete_pod(self, pod: Pod) -> None:
        """End one worker; its group starts another in its place, with the group's present revision."""

    async def delete_task(self, task: Task) -> None:
        """Remove a finished task, this very object; what it left in the store stays."""

    async def patch_task_status(self, task: Task, patch: Manifest) -> None:
        """Merge ``patch`` (JSON merge patch of ``status``) into the task's status."""

    async def patch_pipeline_status(self, pipeline: Pipeline, patch: Manifest) -> None:
        """Merge ``patch`` (JSON merge patch of ``status``) into the pipeline's status."""

    async def emit_event(self, event: Event) -> None:
        """Tell people. Best effort: a failure is logged and forgotten."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where and how one coordinator is reached."""

    url: str
    token: str = field(repr=False)
    trust: CoordinatorTrust | None = None  # needed where the address begins with https


class Coordinators(Protocol):
    """The links to all coordinators; ``mlora_operator.coordinator.Links`` is the one over HTTP."""

    def follow(self, endpoints: Mapping[Key, Endpoint]) -> None:
        """Keep a link to each of these coordinators and to no other."""

    def contacts(self) -> Mapping[Key, Contact]:
        """The last that is known of each, from memory."""

    def clock_jumped(self) -> None:
        """The clock went forward or back while no time passed: what lasts, lasts from now on."""

    async def send_plan(self, pipeline: Key, plan: Plan, read: ReadText) -> None:
        """Hand over a plan; a failure shows in the contact and the loop tries again. ``read``: for workers of a former
        version, which are sent texts in plans. Raises WriteRefused where the coordinator does not understand it."""

    async def send_text(self, pipeline: Key, digest: str, text: str) -> None:
        """Hand over a text that the coordinator lacks."""
