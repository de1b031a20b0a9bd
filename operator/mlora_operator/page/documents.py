"""The JSON that the page's API answers with, version 1. docs/operators/page.md lists every field.

Nothing is in it that ``kubectl get -o wide`` and a status do not show; no Secret, no row of a data set, no endpoint.
Moments are RFC 3339 in UTC, sizes bytes, losses nats per token.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mlora_worker.protocol import Message

Version = Literal["v1"]


class StageDocument(Message):
    """One stage. Bytes; absent where not known."""

    stage: int
    first_layer: int
    last_layer: int
    device: str
    weights: int  # frozen
    predicted: int | None = None  # the most that the tasks with a place may take, weights with them
    used: int | None = None  # at the peak of the microbatch that was last measured
    budget: int | None = None  # that may be used


class PipelineDocument(Message):
    namespace: str
    name: str
    base_model: str
    state: str
    reason: str
    message: str
    policy: str  # of scheduling
    workers: int  # wanted
    ready_workers: int
    training: int  # tasks
    waiting: int
    restarts: int
    tokens_per_second: float
    coordinator: Literal["answers", "starting", "lost", "none"]
    lost_since: str | None = None
    stages: tuple[StageDocument, ...] = ()


class Overview(Message):
    """``GET api/v1/overview``"""

    version: Version = "v1"
    namespaces: tuple[str, ...]  # that have tasks; of a request for one namespace, that one
    states: dict[str, int]  # tasks by state
    tokens_per_second: float
    pipelines: tuple[PipelineDocument, ...]
    pipelines_total: int


class NamespaceDocument(Message):
    """What one namespace has of the pipelines."""

    namespace: str
    training: int  # tasks
    waiting: int
    succeeded: int
    failed: int
    tokens_per_second: float
    trained_tokens: int  # of all its tasks, by their steps and the tokens of a mean row


class NamespaceList(Message):
    """``GET api/v1/namespaces``"""

    version: Version = "v1"
    total: int
    offset: int
    namespaces: tuple[NamespaceDocument, ...]


class TaskDocument(Message):
    uid: str
    namespace: str
    name: str
    base_model: str
    state: str
    reason: str
    message: str  # why, for people
    priority: int
    pipeline: str | None = None
    place: int | None = None  # whose turn it is, from 1
    colour: int | None = None  # of its curve and of its part of a timeline
    created: str
    waits_since: str | None = None
    started: str | None = None
    completed: str | None = None
    step: int | None = None
    total_steps: int | None = None
    loss: float | None = None
    evaluation_loss: float | None = None
    tokens_per_second: float | None = None
    eta: str | None = None  # time to the last step, such as 3m20s, of one that trains
    restarts: int = 0
    preemptions: int = 0
    adapter: str | None = None  # its URI, once it lies there


class TaskList(Message):
    """``GET api/v1/tasks``"""

    version: Version = "v1"
    list: Literal["waiting", "training", "finished"]
    total: int
    offset: int
    tasks: tuple[TaskDocument, ...]


class CurveDocument(Message):
    uid: str
    namespace: str
    name: str
    colour: int
    training: bool
    total_steps: int | None = None
    steps: tuple[int, ...]
    losses: tuple[float, ...]  # as many
    evaluations: tuple[tuple[int, float], ...] = ()  # step, loss


class Losses(Message):
    """``GET api/v1/losses``"""

    version: Version = "v1"
    total: int  # curves that there are
    curves: tuple[CurveDocument, ...]


class SpecField(Message):
    """A field of a task's spec, by its path, and its value in words."""

    name: str
    value: str


class DroppedRows(Message):
    rule: str
    count: int
    first: tuple[str, ...] = ()  # lines, with their file where there are several


class DataDocument(Message):
    """Rows of a task."""

    rows: int
    used: int
    tokens: int
    supervised_tokens: int
    truncated: int
    held_out: int
    beyond_limit: int
    special_tokens: int | None = None
    format: str | None = None  # of the rows, as the spec says or as it was detected
    dropped: tuple[DroppedRows, ...] = ()


class ConditionDocument(Message):
    type: str
    status: str
    reason: str
    message: str
    since: str


class EventDocument(Message):
    at: str
    type: str  # Normal or Warning
    reason: str
    message: str


class TaskDetail(Message):
    """``GET api/v1/task``"""

    version: Version = "v1"
    task: TaskDocument
    spec: tuple[SpecField, ...]
    data: DataDocument | None = None
    conditions: tuple[ConditionDocument, ...]
    events: tuple[EventDocument, ...]
    curve: CurveDocument | None = None
    best_step: int | None = None  # with the lowest evaluation loss
    best_evaluation_loss: float | None = None
    reward_margin: float | None = None  # of a task that learns to prefer, as its status has them
    reward_accuracy: float | None = None
    chosen_logps: float | None = None
    rejected_logps: float | None = None
    kl: float | None = None
    checkpoint_step: int | None = None
    resumed_step: int | None = None
    fetch: str | None = None  # the command that fetches the adapter


class TimelineTask(Message):
    """A task in a timeline. ``name`` is absent where it is another namespace's, or no longer there."""

    name: str | None = None
    colour: int | None = None


class TimelineSpan(Message):
    """Microseconds from the timeline's beginning."""

    stage: int
    kind: Literal["forward", "backward", "update", "evaluate"]
    number: int  # of the microbatch
    tasks: tuple[int, ...]  # positions in ``tasks``
    tokens: int
    start: int
    end: int


class TimelineDocument(Message):
    """``GET api/v1/timeline``"""

    version: Version = "v1"
    pipeline: str
    stages: int
    length: int  # microseconds
    busy: tuple[float, ...] = Field(description="Fraction of that time in which each stage computed.")
    tasks: tuple[TimelineTask, ...]
    spans: tuple[TimelineSpan, ...]


class Trouble(Message):
    """Every answer but 200 and 304. ``following``: another replica leads; ask again, or ask that one."""

    version: Version = "v1"
    error: Literal[
        "following",
        "starting",
        "badRequest",
        "notFound",
        "methodNotAllowed",
        "unreachable",
        "internal",
    ]
    message: str
    leader: str | None = None
