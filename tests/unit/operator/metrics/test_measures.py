"""What is counted when a status is written."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from mlora_operator.metrics.priorities import step_of
from mlora_operator.reconcile.cluster.rest_client import resource_of
from tests.fixtures.exported_metrics import NOW, PIPELINE, condition, exporter, task

HERE = {"pipeline_namespace": "ml", "pipeline": "toy"}
ADMITTED = {
    "conditions": (condition("Admitted"),),
    "pipeline": "ml/toy",
    "start_time": "2026-03-01T12:00:00Z",
}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str, dict[str, str], float | None]] = {
    "a first place": ({}, ADMITTED, "mlora_tasks_admitted_total", {**HERE, "priority": "1"}, 1),
    "the wait for it": ({}, ADMITTED, "mlora_task_wait_seconds_sum", {"priority": "1"}, 60),
    "a place that it had": (
        ADMITTED,
        ADMITTED,
        "mlora_tasks_admitted_total",
        {**HERE, "priority": "1"},
        None,
    ),
    "a second place": (
        {**ADMITTED, "conditions": (condition("Admitted", "False"),)},
        ADMITTED,
        "mlora_tasks_admitted_total",
        {**HERE, "priority": "1"},
        1,
    ),
    "a second place is no second wait": (
        {**ADMITTED, "conditions": ()},
        ADMITTED,
        "mlora_task_wait_seconds_count",
        {"priority": "1"},
        None,
    ),
    "a wait after another try": (
        {},
        {**ADMITTED, "retry_time": "2026-03-01T11:59:50Z"},
        "mlora_task_wait_seconds_sum",
        {"priority": "1"},
        10,
    ),
    "a preemption": (ADMITTED, {**ADMITTED, "preemptions": 1}, "mlora_tasks_preempted_total", HERE, 1),
    "a restart": ({"restarts": 2}, {**ADMITTED, "restarts": 3}, "mlora_tasks_restarted_total", HERE, 1),
    "success": (
        ADMITTED,
        {**ADMITTED, "conditions": (condition("Succeeded", reason="AdapterUploaded"),)},
        "mlora_tasks_finished_total",
        {**HERE, "result": "succeeded", "reason": "AdapterUploaded"},
        1,
    ),
    "failure": (
        ADMITTED,
        {**ADMITTED, "conditions": (condition("Failed", reason="OutOfMemory"),)},
        "mlora_tasks_finished_total",
        {**HERE, "result": "failed", "reason": "OutOfMemory"},
        1,
    ),
    "its duration": (
        ADMITTED,
        {**ADMITTED, "conditions": (condition("Failed"),), "start_time": "2026-03-01T11:00:00Z"},
        "mlora_task_duration_seconds_sum",
        {"result": "failed"},
        3600,
    ),
    "progress alone": ({"step": 1}, {"step": 2}, "mlora_tasks_restarted_total", HERE, None),
}


@pytest.mark.parametrize("case", CASES)
def test_a_written_task(case: str) -> None:
    before, after, name, labels, expected = CASES[case]
    one, made = exporter(), task("t", priority=5, age=60)
    made = replace(made, status=made.status.model_copy(update=before))
    one.measures.task_written(made, made.status.model_copy(update=after), NOW)
    assert one.registry.get_sample_value(name, labels) in ((expected,) if expected is not None else (None, 0))


def test_a_clock_that_was_set_back_gives_no_negative_wait() -> None:
    one = exporter()
    made = task("t")
    one.measures.task_written(made, made.status.model_copy(update=ADMITTED), NOW - timedelta(hours=1))
    assert one.registry.get_sample_value("mlora_task_wait_seconds_sum", {"priority": "0"}) == 0


def test_failures_and_stalls_of_workers_count_once_and_a_count_that_is_set_back_does_not() -> None:
    one = exporter()
    stalled = PIPELINE.status.model_copy(update={"restarts": 2, "conditions": (condition("Stalled"),)})
    one.measures.pipeline_written(PIPELINE, stalled)
    later = replace(PIPELINE, status=stalled)
    one.measures.pipeline_written(later, stalled.model_copy(update={"restarts": None}))
    assert one.registry.get_sample_value("mlora_pipeline_restarts_total", HERE) == 2
    assert one.registry.get_sample_value("mlora_pipeline_stalls_total", HERE) == 1


@pytest.mark.parametrize(
    ("priority", "label"),
    [(-5, "<0"), (0, "0"), (1, "0"), (9, "0"), (10, "10"), (99, "10"), (100, "100"), (2**31, "100")],
)
def test_a_priority_counts_under_the_step_below_it(priority: int, label: str) -> None:
    assert step_of(priority, (0, 10, 100)) == label


@pytest.mark.parametrize(
    ("path", "resource"),
    [
        ("/apis/mlora.dev/v1alpha1/namespaces/a/loratasks/x/status", "loratasks/status"),
        ("/apis/mlora.dev/v1alpha1/namespaces/a/loratasks/status", "loratasks"),  # a task of that name
        ("/apis/mlora.dev/v1alpha1/loratasks", "loratasks"),
        ("/api/v1/namespaces/a/pods/p-0", "pods"),
        ("/api/v1/namespaces/team-a", "namespaces"),
        ("/apis/coordination.k8s.io/v1/namespaces/ml/leases/mlora", "leases"),
        ("/api/v1/namespaces/pods/configmaps/secrets", "configmaps"),
        ("/apis/example.com/v1/namespaces/a/secretthings/x", "other"),
    ],
)
def test_a_request_is_known_by_the_kind_of_what_it_is_about(path: str, resource: str) -> None:
    assert resource_of(path) == resource
