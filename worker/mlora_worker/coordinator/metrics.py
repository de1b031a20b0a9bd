"""What a rank tells Prometheus, on a port of its own without a token: sums over all tasks, and nothing of any one.

Every rank serves how long it computed. Rank 0, which hears of everything, serves the pipeline's figures too. No label names
a task, a user's namespace or a place in a store: whoever may scrape sees how the pipeline fares, and not for whom. (Loss
and progress of single tasks are the operator's to export, where its settings ask for it.)

A share of time that a stage did nothing is ``1 - rate(busy) / rate(training)``: the bubble.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter as Counts
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal, Protocol

from aiohttp import web
from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from mlora_worker.protocol import Report, TaskPhase
from mlora_worker.stream.timeline import Kind

Stored = Literal["adapter", "checkpoint"]

PIPELINE = ("pipeline_namespace", "pipeline")
STEP_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_FRESH_SECONDS = 2.0  # a ring of spans that nobody reads for longer may lose some
STORE_SECONDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Meter(Protocol):
    """Is told by the coordinator what happens. Quick, and called under its lock."""

    def stepped(self, seconds: float) -> None:
        """A task's optimizer step came back whole, so long after its first microbatch was issued."""

    def training(self, active: bool) -> None:
        """Whether any task is in the stream now."""

    def storing(self, what: Stored) -> AbstractContextManager[None]:
        """Around each try to bring something to a store."""


class NullMeter:
    """Where nobody measures."""

    def stepped(self, seconds: float) -> None: ...
    def training(self, active: bool) -> None: ...
    def storing(self, what: Stored) -> AbstractContextManager[None]:
        del what
        return nullcontext()


class RankMetrics(Collector):
    """Of one rank. ``pipeline``: namespace/name; ``busy``: seconds that were computed so far, by kind of work."""

    def __init__(
        self, pipeline: str, stage: int, busy: Callable[[], Mapping[Kind, float]], registry: CollectorRegistry
    ) -> None:
        self._labels = labels_of(pipeline)
        self._stage, self._busy = stage, busy
        # Of the whole process: one more series for each counter, which nobody reads.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        registry.register(self)
        ProcessCollector(registry=registry)

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        busy = CounterMetricFamily(
            "mlora_worker_busy_seconds_total",
            "Time for which this stage computed",
            labels=(*PIPELINE, "stage", "kind"),
        )
        for kind, seconds in self._busy().items():
            busy.add_metric((*self._labels, str(self._stage), kind), seconds)
        yield busy


class PipelineMetrics(Collector):
    """Of the whole pipeline, on rank 0: the coordinator's ``Meter``. ``report``: None before all stages are there."""

    def __init__(
        self,
        pipeline: str,
        report: Callable[[], Report | None],
        registry: CollectorRegistry,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._labels = labels_of(pipeline)
        self._report, self._clock = report, clock
        self._lock = threading.Lock()
        self._trained = 0.0  # seconds
        self._since: float | None = None  # when tasks came into the stream that was empty
        self._steps = Histogram(
            "mlora_worker_step_duration_seconds",
            "Time from the start of a step's first microbatch to the end of its last one",
            PIPELINE,
            buckets=STEP_SECONDS,
            registry=registry,
        ).labels(*self._labels)
        self._stores = Histogram(
            "mlora_worker_upload_duration_seconds",
            "Attempts to upload an adapter or a checkpoint",
            (*PIPELINE, "what", "result"),
            buckets=STORE_SECONDS,
            registry=registry,
        )
        registry.register(self)

    # --- Meter ---

    def stepped(self, seconds: float) -> None:
        self._steps.observe(seconds)

    def training(self, active: bool) -> None:
        with self._lock:
            now = self._clock()
            if self._since is not None:
                self._trained += now - self._since
            self._since = now if active else None

    @contextmanager
    def storing(self, what: Stored) -> Iterator[None]:
        begun, result = self._clock(), "error"
        try:
            yield
            result = "ok"
        finally:
            self._stores.labels(*self._labels, what, result).observe(self._clock() - begun)

    # --- Collector ---

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        report = self._report()
        if report is None:
            return
        with self._lock:
            trained = self._trained + (self._clock() - self._since if self._since is not None else 0.0)
        wire = report.wire
        yield self._counter(
            "mlora_worker_training_seconds_total", "Time for which tasks were in the stream", trained
        )
        yield self._counter("mlora_worker_tokens_total", "Trained tokens; each is counted once", wire.tokens)
        yield self._counter(
            "mlora_worker_microbatches_total",
            "Microbatches of training and evaluation",
            wire.microbatches,
        )
        sent = CounterMetricFamily(
            "mlora_worker_sent_bytes_total",
            "Bytes between stages: hidden states and gradients, and what describes them",
            labels=(*PIPELINE, "what"),
        )
        sent.add_metric((*self._labels, "payload"), wire.payload_bytes)
        sent.add_metric((*self._labels, "descriptor"), wire.descriptor_bytes)
        yield sent
        yield from self._of_stages(report)
        phases = Counts(task.phase for task in report.tasks)
        tasks = GaugeMetricFamily(
            "mlora_worker_tasks", "Tasks in the coordinator's plan", labels=(*PIPELINE, "phase")
        )
        for phase in TaskPhase:
            tasks.add_metric((*self._labels, phase.value), phases[phase])
        yield tasks

    def _of_stages(self, report: Report) -> Iterator[Metric]:
        labels = (*PIPELINE, "stage")
        capacity = GaugeMetricFamily(
            "mlora_worker_memory_capacity_bytes",
            "Memory of the device that other programs leave, or the container's limit",
            labels=labels,
        )
        resident = GaugeMetricFamily(
            "mlora_worker_memory_resident_bytes", "Memory of the frozen weights", labels=labels
        )
        used = GaugeMetricFamily(
            "mlora_worker_memory_used_bytes",
            "Measured peak memory of the last microbatches, including weights, adapters and all microbatches in "
            "flight",
            labels=labels,
        )
        peaks: dict[int, int] = {}
        for sample in report.memory:
            if not sample.calibration:
                peaks[sample.stage] = max(peaks.get(sample.stage, 0), sample.used_bytes)
        for stage in report.stages:
            here = (*self._labels, str(stage.stage))
            capacity.add_metric(here, stage.capacity_bytes)
            resident.add_metric(here, stage.resident_bytes)
            if peaks.get(stage.stage):
                used.add_metric(here, peaks[stage.stage])
        yield from (capacity, resident, used)

    def _counter(self, name: str, help_: str, value: float) -> Metric:
        metric = CounterMetricFamily(name, help_, labels=PIPELINE)
        metric.add_metric(self._labels, value)
        return metric


def labels_of(pipeline: str) -> tuple[str, str]:
    namespace, _, name = pipeline.partition("/")
    return namespace, name


def metrics_app(registry: CollectorRegistry, refresh: Callable[[], object]) -> web.Application:
    """``GET /metrics``, and nothing else. ``refresh`` is called every few seconds, whether anybody scrapes or not."""

    async def metrics(request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(registry), headers={"Content-Type": content_type})

    async def keep_fresh(_: web.Application) -> AsyncIterator[None]:
        async def again_and_again() -> None:
            while True:
                await asyncio.sleep(_FRESH_SECONDS)
                refresh()

        task = asyncio.create_task(again_and_again())
        yield
        task.cancel()

    app = web.Application(client_max_size=1)
    app.add_routes([web.get("/metrics", metrics)])
    app.cleanup_ctx.append(keep_fresh)
    return app
