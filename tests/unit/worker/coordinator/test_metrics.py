"""What ranks tell Prometheus: sums of a pipeline, and nothing of a single task."""

from __future__ import annotations

import itertools

import pytest
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client import CollectorRegistry

from mlora_worker.coordinator.metrics import PipelineMetrics, RankMetrics, metrics_app
from mlora_worker.pipeline.trace import HostMarks, SpanRecorder
from mlora_worker.protocol import (
    Failure,
    FailureReason,
    MemorySample,
    Report,
    TaskPhase,
    TaskReport,
    WireReport,
)
from tests.fixtures.toy_facts import toy_stages

HERE = {"pipeline_namespace": "ml", "pipeline": "toy"}
SECRET = "team-blue-secret"


def report() -> Report:
    failure = Failure(reason=FailureReason.ACCESS_DENIED, message=f"s3://{SECRET}/rows refuses {SECRET}")
    return Report(
        run_id="run-1",
        sequence=7,
        plan_generation=3,
        ready=True,
        stages=toy_stages(),
        tasks=(
            TaskReport(uid=SECRET, phase=TaskPhase.TRAINING, step=3, loss=1.5),
            TaskReport(uid="b", phase=TaskPhase.FAILED, failure=failure),
        ),
        memory=(
            MemorySample(stage=0, tokens=1, squared_tokens=1, used_bytes=5_000_000),
            MemorySample(stage=0, tokens=1, squared_tokens=1, used_bytes=4_000_000),
            MemorySample(stage=1, tokens=1, squared_tokens=1, used_bytes=9_000_000, calibration=True),
        ),
        wire=WireReport(payload_bytes=100, descriptor_bytes=10, tokens=1000, microbatches=20),
    )


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_pipelines_figures_are_those_of_its_report() -> None:
    registry = CollectorRegistry()
    PipelineMetrics("ml/toy", report, registry)
    for name, labels, value in (
        ("mlora_worker_tokens_total", {}, 1000),
        ("mlora_worker_microbatches_total", {}, 20),
        ("mlora_worker_sent_bytes_total", {"what": "payload"}, 100),
        ("mlora_worker_sent_bytes_total", {"what": "descriptor"}, 10),
        ("mlora_worker_tasks", {"phase": "Training"}, 1),
        ("mlora_worker_tasks", {"phase": "Saving"}, 0),
        ("mlora_worker_memory_used_bytes", {"stage": "0"}, 5_000_000),
        ("mlora_worker_memory_used_bytes", {"stage": "1"}, None),  # a calibration is nobody's
        ("mlora_worker_memory_resident_bytes", {"stage": "1"}, 1_000_000),
        ("mlora_worker_memory_capacity_bytes", {"stage": "1"}, 2**33),
    ):
        assert registry.get_sample_value(name, {**HERE, **labels}) == value, (name, labels)


def test_before_all_stages_are_there_nothing_is_said_of_the_pipeline() -> None:
    registry = CollectorRegistry()
    PipelineMetrics("ml/toy", lambda: None, registry)
    assert registry.get_sample_value("mlora_worker_tokens_total", HERE) is None


def test_time_in_training_is_that_with_tasks_in_the_stream() -> None:
    registry, clock = CollectorRegistry(), Clock()
    meter = PipelineMetrics("ml/toy", report, registry, clock)
    for now, active in ((110.0, True), (112.0, True), (115.0, False), (140.0, False), (150.0, True)):
        clock.now = now
        meter.training(active)
    clock.now = 153.0
    assert registry.get_sample_value("mlora_worker_training_seconds_total", HERE) == 5 + 3


def test_tries_to_store_are_told_apart_by_what_and_how_they_ended() -> None:
    registry, clock = CollectorRegistry(), Clock()
    meter = PipelineMetrics("ml/toy", report, registry, clock)
    with meter.storing("adapter"):
        clock.now += 2
    with pytest.raises(OSError), meter.storing("checkpoint"):
        raise OSError
    sum_of = "mlora_worker_upload_duration_seconds_sum"
    assert registry.get_sample_value(sum_of, {**HERE, "what": "adapter", "result": "ok"}) == 2
    count = "mlora_worker_upload_duration_seconds_count"
    assert registry.get_sample_value(count, {**HERE, "what": "checkpoint", "result": "error"}) == 1


def test_a_stage_is_busy_for_as_long_as_its_spans_last_however_few_are_kept() -> None:
    recorder = SpanRecorder(1, HostMarks(itertools.count(0, 500_000_000).__next__), capacity=2)
    registry = CollectorRegistry()
    RankMetrics("ml/toy", 1, recorder.busy, registry)

    def busy(kind: str) -> float | None:
        labels = {**HERE, "stage": "1", "kind": kind}
        return registry.get_sample_value("mlora_worker_busy_seconds_total", labels)

    for number in range(5):
        with recorder.span("forward", number, (SECRET,), 8):
            pass
        assert busy("forward") == (number + 1) * 0.5
    assert (busy("backward"), busy("update"), busy("evaluate")) == (0, 0, 0)


async def test_metrics_are_served_without_a_token_and_name_no_task() -> None:
    registry = CollectorRegistry()
    RankMetrics("ml/toy", 0, dict, registry)
    PipelineMetrics("ml/toy", report, registry).stepped(0.3)
    async with TestClient(TestServer(metrics_app(registry, lambda: None))) as client:
        answer = await client.get("/metrics")
        text = await answer.text()
        assert answer.status == 200
        assert 'mlora_worker_step_duration_seconds_count{pipeline="toy",pipeline_namespace="ml"} 1.0' in text
        assert SECRET not in text
        assert (await client.post("/metrics")).status == 405
        assert (await client.get("/v1/report")).status == 404
