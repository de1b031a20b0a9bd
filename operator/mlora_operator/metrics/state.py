"""Gauges of what the last pass saw and decided, worked out when somebody asks.

A pass only leaves what it has anyway: two references. All of it is frozen, so another thread may read it while the loop
goes on. A replica that does not lead has seen nothing and exports nothing of it, so that a sum over all replicas is right.
"""

from __future__ import annotations

import logging
from collections import Counter as Counts
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from datetime import datetime

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mlora_operator.api import conditions as c
from mlora_operator.api.task import TaskStatus
from mlora_operator.metrics import families as f
from mlora_operator.metrics.measures import pipeline_labels
from mlora_operator.metrics.priorities import step_of
from mlora_operator.metrics.stages import StageMemory, stage_memory
from mlora_operator.reconcile.admission.pipeline_view import view
from mlora_operator.reconcile.state.decision import Decision
from mlora_operator.reconcile.state.decode import time_or
from mlora_operator.reconcile.state.snapshot import Contact, Key, Pipeline, Snapshot, Task, is_true
from mlora_operator.settings import MetricsSettings
from mlora_worker.protocol import TaskReport

logger = logging.getLogger(__name__)
WAITING = frozenset({"Pending", "Preparing", "Queued", "Preempted"})
TRAINING = frozenset({"Training", "Saving", "UploadBlocked"})
PIPELINE_STATES = ("Idle", "Waiting", "Starting", "Ready", "Stalled", "Failed")


@dataclass(frozen=True, slots=True)
class LastPass:
    """One pass."""

    snapshot: Snapshot
    decision: Decision
    at: datetime


class StateCollector(Collector):
    """The last pass of this replica; nothing before the first one, and after the end of its term."""

    def __init__(self, settings: MetricsSettings, now: Callable[[], datetime]) -> None:
        self._settings, self._now = settings, now
        self._seen: LastPass | None = None

    def watch(self, snapshot: Snapshot, decision: Decision) -> None:
        """Called by each pass."""
        self._seen = LastPass(snapshot, decision, self._now())

    def forget(self) -> None:
        self._seen = None

    def describe(self) -> Iterable[Metric]:
        """Nothing at registration: what there is, only a pass can tell."""
        return ()

    def collect(self) -> Iterator[Metric]:
        if self._seen is not None:
            yield from measured(self._seen, self._settings, self._now())


def measured(seen: LastPass, settings: MetricsSettings, now: datetime) -> Iterator[Metric]:
    """One look at every task and pipeline. Pure."""
    statuses = [
        (task, seen.decision.task_statuses.get(task.key, task.status))
        for task in seen.snapshot.tasks
        if not task.deleting
    ]
    yield _gauge(f.LAST_PASS, [((), seen.at.timestamp())])
    known = frozenset(str(one.key) for one in seen.snapshot.pipelines)
    yield from _of_queue(statuses, known, settings, now)
    members: defaultdict[str, list[Task]] = defaultdict(list)
    for task, status in statuses:
        if status.state in TRAINING:
            members[status.pipeline or ""].append(task)
    yield from _of_pipelines(seen, members)
    if settings.tasks:
        yield from _of_tasks([one for one in statuses if one[1].state in TRAINING], seen, settings.most_tasks)


def _of_queue(
    statuses: list[tuple[Task, TaskStatus]], known: Set[str], settings: MetricsSettings, now: datetime
) -> Iterator[Metric]:
    """Tasks of pipelines that are gone count as those of none: old names shall not add up."""
    states: Counts[tuple[str, str]] = Counts()
    waiting: Counts[tuple[str, str]] = Counts()
    oldest: dict[tuple[str, str], datetime] = {}
    for task, status in statuses:
        state = status.state or "Pending"
        pipeline = status.pipeline if status.pipeline is not None and status.pipeline in known else ""
        states[pipeline, state] += 1
        if state in WAITING and not is_true(status.conditions, c.ADMITTED):
            key = pipeline, step_of(task.spec.priority if task.spec is not None else 0, settings.priorities)
            waiting[key] += 1
            since = time_or(status.retry_time, task.created)
            oldest[key] = min(since, oldest.get(key, since))
    yield _gauge(f.TASKS, [((*pipeline_labels(name), state), n) for (name, state), n in states.items()])
    yield _gauge(f.WAITING, [((*pipeline_labels(name), step), n) for (name, step), n in waiting.items()])
    waits = {key: max(0.0, (now - since).total_seconds()) for key, since in oldest.items()}
    yield _gauge(f.LONGEST_WAIT, [((*pipeline_labels(name), step), s) for (name, step), s in waits.items()])


def _of_pipelines(seen: LastPass, members: Mapping[str, list[Task]]) -> Iterator[Metric]:
    rows: defaultdict[str, list[tuple[tuple[str, ...], float]]] = defaultdict(list)
    for pipeline in seen.snapshot.pipelines:
        if pipeline.deleting:
            continue
        place = pipeline.key.namespace, pipeline.key.name
        status = seen.decision.pipeline_statuses.get(pipeline.key, pipeline.status)
        for state in PIPELINE_STATES:
            rows[f.PIPELINE_STATE.name].append(((*place, state), float(status.state == state)))
        rows[f.WORKERS_WANTED.name].append((place, status.replicas or 0))
        rows[f.WORKERS_READY.name].append((place, status.ready_replicas or 0))
        rows[f.ACTIVE.name].append((place, status.active_tasks or 0))
        contact = seen.snapshot.contacts.get(pipeline.key, Contact())
        report = contact.live
        if status.replicas:
            rows[f.REACHABLE.name].append((place, float(report is not None)))
        certificate = seen.snapshot.certificate_ends.get(pipeline.key)
        if certificate is not None:
            rows[f.CERTIFICATE_END.name].append((place, certificate.at.timestamp()))
        if report is None:
            continue
        rows[f.TOKENS.name].append((place, report.wire.tokens))
        rows[f.MICROBATCHES.name].append((place, report.wire.microbatches))
        for one in _stages(pipeline, members.get(str(pipeline.key), []), seen.snapshot):
            here = (*place, str(one.stage))
            rows[f.BUDGET.name].append((here, one.budget))
            rows[f.PREDICTED.name].append((here, one.predicted))
            if one.used:
                rows[f.USED.name].append((here, one.used))
    for family in (
        f.PIPELINE_STATE,
        f.WORKERS_WANTED,
        f.WORKERS_READY,
        f.ACTIVE,
        f.REACHABLE,
        f.CERTIFICATE_END,
    ):
        yield _gauge(family, rows[family.name])
    for family in (f.TOKENS, f.MICROBATCHES):
        metric = CounterMetricFamily(family.name, family.help, labels=family.labels)
        for labels, value in rows[family.name]:
            metric.add_metric(labels, value)
        yield metric
    for family in (f.BUDGET, f.PREDICTED, f.USED):
        yield _gauge(family, rows[family.name])


def _stages(pipeline: Pipeline, tasks: list[Task], snapshot: Snapshot) -> tuple[StageMemory, ...]:
    """None of a pipeline whose memory cannot be looked at: the loop says so, and all others have theirs."""
    if pipeline.spec is None:
        return ()
    try:
        return stage_memory(view(pipeline, tuple(tasks), snapshot))
    except Exception as error:
        logger.debug("no memory of %s can be shown: %r", pipeline.key, error)
        return ()


def _of_preferences(name: str) -> Callable[[TaskReport], float | None]:
    return lambda told: getattr(told.preference, name) if told.preference is not None else None


_OF_TASKS: tuple[tuple[f.MetricFamily, Callable[[TaskReport], float | None]], ...] = (
    (f.TASK_STEP, lambda told: told.step),
    (f.TASK_STEPS, lambda told: told.total_steps),
    (f.TASK_LOSS, lambda told: told.loss),
    (f.TASK_EVALUATION_LOSS, lambda told: told.evaluation.loss if told.evaluation is not None else None),
    (f.TASK_REWARD_MARGIN, _of_preferences("margin")),
    (f.TASK_REWARD_ACCURACY, _of_preferences("accuracy")),
    (f.TASK_CHOSEN_LOGPS, _of_preferences("chosen_logps")),
    (f.TASK_REJECTED_LOGPS, _of_preferences("rejected_logps")),
    (f.TASK_KL, _of_preferences("kl")),
    (f.TASK_SPEED, lambda told: told.tokens_per_second),
)


def _of_tasks(training: list[tuple[Task, TaskStatus]], seen: LastPass, most: int) -> Iterator[Metric]:
    """The longest in training first, so that a series does not come and go with its neighbours."""
    training.sort(key=lambda one: (one[1].start_time or "", one[0].uid))
    reports: list[tuple[tuple[str, ...], TaskReport]] = []
    for task, status in training[:most]:
        namespace, name = pipeline_labels(status.pipeline)
        reported = seen.snapshot.contacts.get(Key(namespace, name), Contact()).tasks.get(task.uid)
        if reported is not None:
            reports.append(((namespace, name, task.key.namespace, task.key.name), reported))
    for family, figure in _OF_TASKS:
        known = ((labels, figure(reported)) for labels, reported in reports)
        yield _gauge(family, [(labels, value) for labels, value in known if value is not None])
    yield _gauge(f.TASKS_LEFT_OUT, [((), max(0, len(training) - most))])


def _gauge(family: f.MetricFamily, rows: Iterable[tuple[tuple[str, ...], float]]) -> GaugeMetricFamily:
    metric = GaugeMetricFamily(family.name, family.help, labels=family.labels)
    for labels, value in rows:
        metric.add_metric(labels, value)
    return metric
