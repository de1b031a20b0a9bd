"""What real ranks tell Prometheus and write to their logs while tasks train, and what they keep to themselves."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mlora_worker.protocol import StorageAccess, TaskPhase, TaskPlan
from tests.integration.worker.conftest import Group, free_ports

pytestmark = pytest.mark.integration

SECRET = "wJalrXUtnFEMIK7MDENG"
Sample = tuple[str, frozenset[tuple[str, str]]]


def scrape(port: int) -> tuple[dict[Sample, float], str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    return found, text


def of(name: str, **labels: str) -> Sample:
    return name, frozenset({"pipeline_namespace": "test", "pipeline": "group", **labels}.items())


def test_ranks_export_sums_and_their_lines_name_the_task_but_no_secret(
    start_group: Callable[..., Group], make_task: Callable[..., TaskPlan], tiny_model: Path
) -> None:
    (port,) = free_ports(1)  # each rank of one machine has the port after its predecessor's
    group = start_group(tiny_model, stages=2, metrics_port=port, log_format="json", measure_every=1)
    trained = make_task("blue-bot", generation=2)
    keys = StorageAccess.model_validate(
        {"endpoint": "http://127.0.0.1:9", "accessKey": "AKIAEXAMPLE", "secretKey": SECRET}
    )
    away = make_task("lost-bot", generation=5, storage=keys.model_dump(mode="json"), outputUri="s3://b/lost")
    group.plan(trained, away)
    group.wait_for(lambda report: report.tasks[0].phase is TaskPhase.SUCCEEDED)
    group.until(lambda: "next attempt in" in group.logs(), "a store that is away is told of")

    (first, text), (second, later) = scrape(port), scrape(port + 1)
    wire = group.report().wire
    assert first[of("mlora_worker_tokens_total")] == wire.tokens > 0
    assert first[of("mlora_worker_sent_bytes_total", what="payload")] == wire.payload_bytes > 0
    assert first[of("mlora_worker_step_duration_seconds_count")] == 5
    adapter = of("mlora_worker_upload_duration_seconds_count", what="adapter", result="ok")
    assert first[adapter] == 1
    training = first[of("mlora_worker_training_seconds_total")]
    busy = [
        samples[of("mlora_worker_busy_seconds_total", stage=str(stage), kind=kind)]
        for stage, samples in enumerate((first, second))
        for kind in ("forward", "backward")
    ]
    assert all(0 < seconds < training for seconds in busy), (busy, training)
    for stage in ("0", "1"):
        resident = first[of("mlora_worker_memory_resident_bytes", stage=stage)]
        assert first[of("mlora_worker_memory_used_bytes", stage=stage)] > resident > 0
    assert first[of("mlora_worker_tasks", phase="Succeeded")] == 1
    names = {sample for sample, _ in second if sample.startswith("mlora_")}
    assert names == {"mlora_worker_busy_seconds_total"}, "what concerns the pipeline is told once"
    for word in ("blue-bot", "lost-bot", "uid-", SECRET, "AKIAEXAMPLE"):
        assert word not in text + later

    lines = [
        json.loads(line)
        for path in group.folder.glob("rank-*.log")
        for line in path.read_text().splitlines()
        if line.startswith("{")
    ]
    assert {line["pipeline"] for line in lines} == {"test/group"}
    about_one = [line for line in lines if "-bot" in line["message"]]
    assert {line.get("task") for line in about_one} == {"blue-bot", "lost-bot"}
    assert {(line["task"], line["namespace"], line["generation"]) for line in about_one} == {
        ("blue-bot", "test", 2),
        ("lost-bot", "test", 5),
    }
    assert SECRET not in group.logs()
