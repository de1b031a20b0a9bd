"""What a scrape of the operator finds: everything that is documented, of the replica that leads, in bounded number."""

from __future__ import annotations

import re
import time
from dataclasses import replace

import pytest

from mlora_operator.metrics.exporter import Exporter
from mlora_operator.metrics.families import FAMILIES
from mlora_operator.reconcile.decide import decide
from mlora_operator.reconcile.state.decision import Decision
from mlora_operator.reconcile.state.snapshot import Contact, Key, Snapshot, Task
from mlora_worker.protocol import TaskPhase
from tests.fixtures.exported_metrics import (
    NOW,
    PIPELINE,
    SETTINGS,
    condition,
    exported,
    exporter,
    full_exporter,
    reported,
    snapshot,
    task,
)

HERE = {"pipeline_namespace": "ml", "pipeline": "toy"}


def value(one: Exporter, name: str, **labels: str) -> float | None:
    return one.registry.get_sample_value(name, labels)


def seen_by(one: Exporter, seen: Snapshot) -> None:
    one.watch(seen, decide(seen, SETTINGS, NOW))


def test_all_families_are_exported_with_their_types_and_labels_and_nothing_else() -> None:
    found = exported(full_exporter().registry)
    own = {name: (one.kind, one.labels) for name, one in found.items() if not name.startswith("process_")}
    assert own == {one.name: (one.kind, frozenset(one.labels)) for one in FAMILIES}


def test_names_follow_the_conventions_of_prometheus() -> None:
    for family in FAMILIES:
        assert re.fullmatch(r"mlora_[a-z]+(_[a-z]+)*", family.name)
        assert family.name.endswith("_total") == (family.kind == "counter"), family.name
        if family.kind == "histogram":
            assert family.name.endswith("_seconds")
            assert list(family.buckets) == sorted(family.buckets)
        assert not re.search(r"_(ms|milliseconds|minutes|kb|mib|mb|percent)(_|$)", family.name)
        assert family.help


def test_a_replica_that_follows_says_only_that_it_does() -> None:
    one = exporter(leads=lambda: False)
    assert value(one, "mlora_operator_leader") == 0
    assert value(one, "mlora_operator_watching") == 1
    state = {
        family.name
        for family in FAMILIES
        if family.name.startswith(("mlora_tasks", "mlora_pipeline")) and family.kind == "gauge"
    }
    assert not state & exported(one.registry).keys()


def test_the_end_of_a_term_takes_what_was_seen_with_it_and_leaves_what_was_done() -> None:
    one = full_exporter()
    assert value(one, "mlora_pipeline_active_tasks", **HERE) == 1
    one.end_of_term()
    assert value(one, "mlora_pipeline_active_tasks", **HERE) is None
    assert value(one, "mlora_operator_last_pass_timestamp_seconds") is None
    assert value(one, "mlora_tasks_preempted_total", **HERE) == 1


def test_tasks_are_counted_by_state_and_those_that_wait_by_steps_of_priority() -> None:
    one = exporter(priorities=[0, 10])
    trains, low, older = task("trains"), task("low", priority=-3), task("older", age=600, priority=12)
    newer, suspended = task("newer", priority=99), task("suspended", suspend=True)
    tasks = (trains, low, older, newer, suspended)
    seen_by(
        one,
        snapshot(
            tasks,
            reported(trains, TaskPhase.TRAINING),
            *(reported(other, TaskPhase.PREPARING) for other in tasks[1:]),
        ),
    )
    assert value(one, "mlora_tasks", state="Training", **HERE) == 1
    assert value(one, "mlora_tasks", state="Preparing", **HERE) == 3
    assert value(one, "mlora_tasks", state="Suspended", **HERE) == 1
    assert value(one, "mlora_tasks_waiting", priority="<0", **HERE) == 1
    assert value(one, "mlora_tasks_waiting", priority="10", **HERE) == 2
    assert value(one, "mlora_tasks_waiting", priority="0", **HERE) is None, "suspended, or in training"
    assert value(one, "mlora_tasks_longest_wait_seconds", priority="10", **HERE) == 600


def test_a_task_with_a_place_waits_no_longer_though_it_is_still_called_queued() -> None:
    one, admitted = exporter(), task("a")
    seen_by(one, snapshot((admitted,), reported(admitted, TaskPhase.PREPARED)))
    assert value(one, "mlora_tasks", state="Queued", **HERE) == 1
    assert value(one, "mlora_tasks_waiting", priority="0", **HERE) is None


def test_tasks_of_no_pipeline_and_of_one_that_is_gone_bear_no_pipelines_name() -> None:
    one = exporter()
    gone = {
        "state": "Succeeded",
        "pipeline": "ml/former",
        "conditions": [condition("Succeeded").model_dump(by_alias=True)],
    }
    seen_by(one, snapshot((task("lost", baseModel="Org/Other"), task("done", status=gone))))
    assert value(one, "mlora_tasks", state="Rejected", pipeline_namespace="", pipeline="") == 1
    assert value(one, "mlora_tasks", state="Succeeded", pipeline_namespace="", pipeline="") == 1


def test_memory_is_told_by_stage_as_used_and_as_predicted_for_the_tasks_in_training() -> None:
    one, first, second = exporter(), task("a"), task("b")
    of_stage = {**HERE, "stage": "1"}
    predictions = []
    for tasks in ((), (first,), (first, second)):
        seen_by(
            one, snapshot(tasks, *(reported(other, TaskPhase.TRAINING) for other in tasks), used=7_000_000)
        )
        predictions.append(value(one, "mlora_pipeline_memory_predicted_bytes", **of_stage) or 0)
    assert 1_000_000 < predictions[0] < predictions[1] < predictions[2]
    assert value(one, "mlora_pipeline_memory_used_bytes", **of_stage) == 7_000_000
    assert value(one, "mlora_pipeline_memory_budget_bytes", **of_stage) == int(2**33 * 0.95)


@pytest.mark.parametrize(
    ("contact", "reachable"), [(None, 1), (Contact(), 0), (Contact(lost_since=NOW, starting=True), 0)]
)
def test_a_coordinator_is_reachable_while_it_answers(contact: Contact | None, reachable: float) -> None:
    one, waits = exporter(), task("a")
    seen = snapshot((waits,), reported(waits, TaskPhase.PREPARING))
    if contact is not None:
        seen = replace(seen, contacts={PIPELINE.key: contact})
    seen_by(one, seen)
    assert value(one, "mlora_pipeline_coordinator_reachable", **HERE) == reachable
    tokens = value(one, "mlora_pipeline_tokens_total", **HERE)
    assert tokens == (1000 if reachable else None)


def test_single_tasks_have_series_only_on_demand_and_only_so_many() -> None:
    tasks = tuple(task(f"t{number}") for number in range(5))
    seen = snapshot(tasks, *(reported(one, TaskPhase.TRAINING, step=3, loss=1.5) for one in tasks))
    silent, talks = exporter(), exporter(tasks=True, mostTasks=3)
    for one in (silent, talks):
        seen_by(one, seen)
    assert not [
        name for name in exported(silent.registry) if name.startswith("mlora_task_") and "loss" in name
    ]
    losses = [
        sample.labels["task"]
        for metric in talks.registry.collect()
        if metric.name == "mlora_task_loss"
        for sample in metric.samples
    ]
    assert losses == ["t0", "t1", "t2"]
    assert value(talks, "mlora_task_series_left_out") == 2
    assert value(talks, "mlora_task_loss", task="t1", task_namespace="team-a", **HERE) == 1.5


def test_each_figure_of_preferences_has_a_series_of_its_own() -> None:
    one = full_exporter()
    names = ("reward_margin", "reward_accuracy", "chosen_logps", "rejected_logps", "kl")
    found = [
        value(one, f"mlora_task_{name}", task="trains", task_namespace="team-a", **HERE) for name in names
    ]
    assert found == [1.0, 0.75, -20.0, -30.0, 0.25]


def many(count: int) -> tuple[tuple[Task, ...], Decision]:
    """Tasks of many namespaces, names and priorities, in all states, with a decision that says so."""
    first = task("t")
    assert first.spec is not None
    specs = [first.spec.model_copy(update={"priority": priority}) for priority in range(-300, 2000, 23)]
    since = {"pipeline": "ml/toy", "start_time": "2026-03-01T11:00:00Z"}
    statuses = [
        first.status.model_copy(update={"state": state, **since})
        for state in ("Queued", "Training", "Succeeded", "Failed", "Preempted")
    ]
    keys = [Key(f"ns-{number % 500}", f"task-{number}") for number in range(count)]
    made = tuple(
        replace(first, key=key, uid=f"uid-{number}", spec=specs[number % len(specs)])
        for number, key in enumerate(keys)
    )
    return made, Decision(task_statuses={key: statuses[n % len(statuses)] for n, key in enumerate(keys)})


def test_ten_thousand_tasks_make_no_more_series_than_a_hundred_and_cost_a_pass_nothing() -> None:
    one = exporter()
    tasks, decision = many(10_000)
    seen = snapshot(tasks)
    one.watch(seen, decision)
    began = time.thread_time()
    one.watch(seen, decision)
    assert time.thread_time() - began < 0.005, "a pass leaves a reference behind and goes on"
    ends = {"conditions": (condition("Admitted"), condition("Failed", reason="InvalidRow")), "preemptions": 1}
    ended = tasks[0].status.model_copy(update={"pipeline": "ml/toy", **ends})
    for done in tasks:
        one.measures.task_written(done, ended, NOW)
    series = [sample for metric in one.registry.collect() for sample in metric.samples]
    assert len(series) < 300
    text = str(series)
    assert "task-" not in text
    assert "ns-" not in text
    assert value(one, "mlora_tasks_finished_total", result="failed", reason="InvalidRow", **HERE) == 10_000


def test_series_are_there_before_anything_happens_so_that_the_first_event_shows_as_an_increase() -> None:
    one = exporter()
    one.watch(snapshot(()), Decision())
    for name, labels in (
        ("mlora_tasks_finished_total", {**HERE, "result": "failed", "reason": "OutOfMemory"}),
        ("mlora_tasks_admitted_total", {**HERE, "priority": "1000"}),
        ("mlora_tasks_preempted_total", HERE),
        ("mlora_pipeline_stalls_total", HERE),
        ("mlora_task_wait_seconds_count", {"priority": "<0"}),
        ("mlora_operator_reconcile_errors_total", {"stage": "write"}),
    ):
        assert value(one, name, **labels) == 0, name


def test_pipelines_that_are_gone_leave_no_series_behind() -> None:
    one = full_exporter()
    counted = ("mlora_tasks_preempted_total", "mlora_pipeline_stalls_total", "mlora_tasks_finished_total")
    assert set(counted) <= exported(one.registry).keys()
    one.watch(Snapshot(), Decision())
    assert not [
        sample
        for metric in one.registry.collect()
        for sample in metric.samples
        if sample.labels.get("pipeline") == "toy"
    ]
