"""What shall be: the outcome of ``decide``, in frozen nouns. Pure.

A decision says all that shall be; the edge writes only what differs from what is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mlora_operator.api.pipeline_status import PipelineStatus
from mlora_operator.api.task import TaskStatus
from mlora_operator.reconcile.state.snapshot import Key, Pipeline, Pod, Task
from mlora_worker.protocol import Plan

ERROR_SHOWN = 400  # characters
Manifest = dict[str, Any]  # an object as JSON for the API server


@dataclass(frozen=True, slots=True)
class DesiredWorkers:
    """The workers that a pipeline shall have: ``replicas`` is all of its stages, or none."""

    pipeline: Pipeline
    replicas: int


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to an object, told once."""

    kind: Literal["LoRATask", "LoRAPipeline"]
    about: Key
    uid: str
    type: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class DecisionFault:
    """An object that no decision could be made about, and what was raised."""

    kind: Literal["LoRATask", "LoRAPipeline"]
    about: Key
    uid: str
    error: Exception = field(compare=False)

    @property
    def words(self) -> str:
        """Type and message; the message of an error may have lines, or a report in it."""
        text = f"{type(self.error).__name__}: {self.error}"
        return "".join(one if one.isprintable() else " " for one in text[:ERROR_SHOWN]).strip()


@dataclass(frozen=True, slots=True)
class Decision:
    task_statuses: Mapping[Key, TaskStatus] = field(default_factory=dict)
    pipeline_statuses: Mapping[Key, PipelineStatus] = field(default_factory=dict)
    new_pipelines: tuple[Manifest, ...] = ()  # from the catalogue, and replicas; made, or brought up to date
    delete_pipelines: tuple[Pipeline, ...] = ()  # replicas that nobody needs any more
    workers: Mapping[Key, DesiredWorkers] = field(
        default_factory=dict
    )  # a pipeline that is not named keeps what it has
    delete_pods: tuple[Pod, ...] = ()  # the group makes them anew
    delete_tasks: tuple[Task, ...] = ()  # finished, and their time to live is over
    plans: Mapping[Key, Plan] = field(default_factory=dict)  # to send now; repr hides the keys in them
    plan_sizes: Mapping[Key, int] = field(default_factory=dict)  # bytes of these as JSON
    texts: Mapping[Key, tuple[str, ...]] = field(
        default_factory=dict
    )  # to send now, by pipeline: their digests
    events: tuple[Event, ...] = ()
    unjudged: frozenset[str] = frozenset()  # uids of tasks that wait for the next decision (``spec_checks``)
    faults: tuple[DecisionFault, ...] = ()  # what no decision could be made about
