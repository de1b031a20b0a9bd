"""What two operator processes export and log of a task's life, on a real API server."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.operator.conftest import free_port

pytestmark = pytest.mark.integration

SECRET = "wJalrXUtnFEMIK7MDENG"
Found = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(port: int) -> Found:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def of(found: Found, name: str, **labels: str) -> float:
    """Sum of the series with at least these labels; 0 without any."""
    return sum(
        value for (one, own), value in found.items() if one == name and set(labels.items()) <= set(own)
    )


@pytest.fixture(scope="module")
def replicas(house: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Any]]:
    """Two operators in the place of the house's own, by the ports of their metrics; one of them leads."""
    house.operator.stop()
    settings = json.loads(Path(house.operator._settings).read_text())
    settings |= {"log": {"format": "json"}, "leaderElection": {"leaseSeconds": 5, "deadlineSeconds": 3}}
    made = {}
    for name in ("one", "two"):
        port = free_port()
        metrics = {"enabled": True, "port": port, "tasks": True}
        operator = type(house.operator)(
            house.kubectl.kubeconfig, {**settings, "metrics": metrics}, tmp_path_factory.mktemp(name)
        )
        os.environ["MLORA_POD_NAME"] = name  # as the chart does
        try:
            operator.start()
        finally:
            del os.environ["MLORA_POD_NAME"]
        made[port] = operator
    yield made
    for operator in made.values():
        operator.stop()


def test_the_leader_exports_what_became_of_a_task_and_the_follower_itself_alone(
    bench: Any, replicas: dict[int, Any]
) -> None:
    keys = {"AWS_ACCESS_KEY_ID": "AKIAEXAMPLE", "AWS_SECRET_ACCESS_KEY": SECRET}
    bench.kubectl.create(
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}, "stringData": keys}
    )
    storage = {"endpoint": "http://s3.example:8333", "secretRef": {"name": "keys"}}
    rows = {"uri": f"https://rows.example/train.jsonl?X-Amz-Signature={SECRET}"}
    bench.apply("t1", priority=12, storage=storage, dataset=rows)
    bench.kubectl("wait", "--for=condition=Succeeded", "--timeout=60s", "loratask/t1")

    def leader() -> int | None:
        return next((port for port in replicas if of(scrape(port), "mlora_operator_leader") == 1), None)

    first = bench.until(leader, "one of them leads")
    other = next(port for port in replicas if port != first)
    bench.until(lambda: of(scrape(first), "mlora_tasks", state="Succeeded") == 1, "the end is in the metrics")
    led, followed = scrape(first), scrape(other)
    for name, labels in (
        ("mlora_tasks_admitted_total", {"priority": "10"}),
        ("mlora_tasks_finished_total", {"result": "succeeded", "reason": "AdapterUploaded"}),
        ("mlora_task_wait_seconds_count", {"priority": "10"}),
        ("mlora_task_duration_seconds_count", {"result": "succeeded"}),
    ):
        assert of(led, name, **labels) == 1, name
    assert of(led, "mlora_operator_pass_duration_seconds_count") >= 3
    writes = of(
        led, "mlora_operator_api_requests_total", method="PATCH", resource="loratasks/status", code="200"
    )
    assert 3 <= writes <= 12
    assert of(led, "mlora_operator_api_requests_total", resource="other") == 0
    assert (
        of(led, "mlora_pipeline_memory_budget_bytes") > of(led, "mlora_pipeline_memory_predicted_bytes") > 0
    )

    assert (of(followed, "mlora_operator_leader"), of(followed, "mlora_operator_watching")) == (0, 1)
    assert not [name for name, _ in followed if name in ("mlora_tasks", "mlora_pipeline_state")]
    assert of(followed, "process_resident_memory_bytes") > 0

    log = replicas[first].log.read_text()
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    told = [line for line in lines if f"{bench.namespace}/t1" in line["message"]]
    assert len(told) >= 3
    whom = {(line.get("task"), line.get("namespace"), line.get("generation")) for line in told}
    assert whom == {("t1", bench.namespace, 1)}
    assert {line.get("pipeline") for line in told} == {None, f"{bench.namespace}/{bench.pipeline()}"}
    for text in (log, replicas[other].log.read_text(), str(led)):
        assert SECRET not in text

    replicas[first].stop()
    bench.until(lambda: of(scrape(other), "mlora_operator_leader") == 1, "the other one takes over")
    bench.until(lambda: of(scrape(other), "mlora_tasks", state="Succeeded") == 1, "and sees what there is")
    assert of(scrape(other), "mlora_tasks_finished_total") == 0, "which it did not do itself"
