"""What this process has done, counted as it happens (``reconcile.observer``).

Counters begin at zero with each process, which Prometheus takes for what it is. What is counted was written: a decision
that another pass repeats counts once.

Series are there from the beginning, at zero: the first event of one that was not there before is lost to ``increase``.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from mlora_operator.api import conditions as c
from mlora_operator.api.meta import Condition
from mlora_operator.api.pipeline_status import PipelineStatus
from mlora_operator.api.task import TaskStatus
from mlora_operator.metrics import families as f
from mlora_operator.metrics.priorities import labels_of, step_of
from mlora_operator.reconcile.state.decode import time_or
from mlora_operator.reconcile.state.snapshot import Key, Pipeline, Task, condition, is_true
from mlora_worker.protocol import FailureReason

ENDS = (
    ("succeeded", c.REASON_ADAPTER_UPLOADED),
    ("failed", c.REASON_DEADLINE_EXCEEDED),
    *(("failed", reason.value) for reason in FailureReason),
)  # result and reason of all ends of a task


class Measures:
    """The counters and histograms of ``families``. ``priorities``: steps, ascending."""

    def __init__(self, registry: CollectorRegistry, priorities: Sequence[int]) -> None:
        self._priorities = priorities
        self._pass = _histogram(f.PASS, registry)
        self._decision = _histogram(f.DECISION, registry)
        self._failed_passes = _gauge(f.FAILED_PASSES, registry)
        self._undecided = _gauge(f.UNDECIDED, registry)
        self._errors = _counter(f.ERRORS, registry)
        self._requests = _counter(f.API_REQUESTS, registry)
        self._request_seconds = _histogram(f.API_DURATION, registry)
        self._admitted = _counter(f.ADMITTED, registry)
        self._preempted = _counter(f.PREEMPTED, registry)
        self._restarted = _counter(f.RESTARTED, registry)
        self._finished = _counter(f.FINISHED, registry)
        self._wait = _histogram(f.WAIT, registry)
        self._duration = _histogram(f.DURATION, registry)
        self._stalls = _counter(f.STALLS, registry)
        self._pipeline_restarts = _counter(f.PIPELINE_RESTARTS, registry)
        self._of_pipelines = (
            self._admitted, self._preempted, self._restarted, self._finished, self._stalls,
            self._pipeline_restarts,
        )  # fmt: skip
        self._pipelines: frozenset[Key] = frozenset()
        for stage in ("pass", "write"):
            self._errors.labels(stage)
        self.end_of_term()
        for priority in labels_of(priorities):
            self._wait.labels(priority)
        for result in ("succeeded", "failed"):
            self._duration.labels(result)
        self._finished.labels("", "", "failed", c.REASON_DEADLINE_EXCEEDED)  # no pipeline has taken it

    # --- reconcile.observer.Observer ---

    def passed(self, whole: float, deciding: float) -> None:
        self._pass.observe(whole)
        self._decision.observe(deciding)

    def pass_failed(self) -> None:
        self._errors.labels("pass").inc()

    def failing(self, times: int) -> None:
        self._failed_passes.set(times)

    def isolated(self, tasks: int, pipelines: int) -> None:
        self._undecided.labels("LoRATask").set(tasks)
        self._undecided.labels("LoRAPipeline").set(pipelines)

    def end_of_term(self) -> None:
        """Who does not lead decides nothing, and fails at nothing."""
        self.failing(0)
        self.isolated(0, 0)

    def write_failed(self) -> None:
        self._errors.labels("write").inc()

    def task_written(self, task: Task, status: TaskStatus, now: datetime) -> None:
        before = task.status
        place = pipeline_labels(status.pipeline)
        priority = step_of(task.spec.priority if task.spec is not None else 0, self._priorities)
        if _came_true(c.ADMITTED, before.conditions, status.conditions):
            self._admitted.labels(*place, priority).inc()
        if status.start_time is not None and before.start_time is None:
            since = time_or(status.retry_time, task.created)
            self._wait.labels(priority).observe(max(0.0, (now - since).total_seconds()))
        _add(self._preempted, place, before.preemptions, status.preemptions)
        _add(self._restarted, place, before.restarts, status.restarts)
        for type_, result in ((c.SUCCEEDED, "succeeded"), (c.FAILED, "failed")):
            if _came_true(type_, before.conditions, status.conditions):
                held = condition(status.conditions, type_)
                assert held is not None
                self._finished.labels(*place, result, held.reason).inc()
                if status.start_time is not None:
                    seconds = (now - time_or(status.start_time, now)).total_seconds()
                    self._duration.labels(result).observe(max(0.0, seconds))

    def pipeline_written(self, pipeline: Pipeline, status: PipelineStatus) -> None:
        before, place = pipeline.status, (pipeline.key.namespace, pipeline.key.name)
        if _came_true(c.STALLED, before.conditions, status.conditions):
            self._stalls.labels(*place).inc()
        _add(self._pipeline_restarts, place, before.restarts, status.restarts)

    # --- reconcile.kubeapi.Tally ---

    def request(self, method: str, resource: str, status: int | None, seconds: float) -> None:
        self._requests.labels(method, resource, "none" if status is None else str(status)).inc()
        self._request_seconds.labels(method).observe(seconds)

    def keep_only(self, pipelines: frozenset[Key]) -> None:
        """Begin to count for those that are new, and forget those that are gone: names of the past shall not add up."""
        if pipelines == self._pipelines:
            return
        for gone in self._pipelines - pipelines:
            for counter in self._of_pipelines:
                counter.remove_by_labels({"pipeline_namespace": gone.namespace, "pipeline": gone.name})
        for new in pipelines - self._pipelines:
            place = new.namespace, new.name
            for counter in (self._preempted, self._restarted, self._stalls, self._pipeline_restarts):
                counter.labels(*place)
            for priority in labels_of(self._priorities):
                self._admitted.labels(*place, priority)
            for result, reason in ENDS:
                self._finished.labels(*place, result, reason)
        self._pipelines = pipelines


def pipeline_labels(name: str | None) -> tuple[str, str]:
    """Of ``namespace/name``; two empty ones of a task that no pipeline has taken."""
    namespace, _, own = (name or "").partition("/")
    return namespace, own


def _came_true(type_: str, before: tuple[Condition, ...], after: tuple[Condition, ...]) -> bool:
    return is_true(after, type_) and not is_true(before, type_)


def _add(counter: Counter, labels: tuple[str, ...], before: int | None, after: int | None) -> None:
    more = (after or 0) - (before or 0)
    if more > 0:
        counter.labels(*labels).inc(more)


def _counter(family: f.MetricFamily, registry: CollectorRegistry) -> Counter:
    return Counter(family.name, family.help, family.labels, registry=registry)


def _gauge(family: f.MetricFamily, registry: CollectorRegistry) -> Gauge:
    return Gauge(family.name, family.help, family.labels, registry=registry)


def _histogram(family: f.MetricFamily, registry: CollectorRegistry) -> Histogram:
    return Histogram(family.name, family.help, family.labels, buckets=family.buckets, registry=registry)
