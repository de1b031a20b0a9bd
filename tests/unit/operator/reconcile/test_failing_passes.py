"""Passes that fail are seen by the probe and in the metrics; what concerns one object fails no pass, and is logged once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from mlora_operator.metrics.measures import Measures
from mlora_operator.reconcile import decide as deciding
from mlora_operator.reconcile.cluster import writer
from mlora_operator.reconcile.cluster.api_server import ApiServerCluster, Indexes
from mlora_operator.reconcile.failed_passes import failed_again
from mlora_operator.reconcile.loop import Loop
from mlora_operator.reconcile.ports import ClusterObjects
from mlora_operator.reconcile.state import decode
from tests.unit.operator.reconcile.test_impossible_workers import Api, NoCoordinators, unasked


class Cluster(ApiServerCluster):
    """Real, over raw objects that a test may change; it may be that it cannot say what there is."""

    def __init__(self, make: Any, *tasks: Mapping[str, Any], pipelines: Any = (), events: Any = ()) -> None:
        self.api, self.tasks, self.broken = Api(), list(tasks), False
        nothing = lambda: ()  # noqa: E731
        indexes = Indexes(lambda: self.tasks, lambda: pipelines, nothing, nothing, nothing, lambda: events)
        super().__init__(self.api, indexes, make.settings(), lambda: "token", unasked)  # type: ignore[arg-type]

    def objects(self) -> ClusterObjects:
        if self.broken:
            raise RuntimeError("the lines\nof an error")
        return super().objects()


def loop_of(make: Any, cluster: Cluster, measures: Measures | None = None) -> Loop:
    return Loop(cluster, NoCoordinators(), make.settings(), now=lambda: make.now, witness=measures)  # type: ignore[arg-type]


@asynccontextmanager
async def running(loop: Loop) -> Any:
    task = asyncio.create_task(loop.run())
    try:
        async with asyncio.timeout(20):
            yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(loop: Loop, holds: Any) -> None:
    while not holds():
        loop.wake()
        await asyncio.sleep(0.02)


async def test_passes_that_fail_are_counted_until_one_succeeds(make: Any) -> None:
    registry = CollectorRegistry()
    cluster = Cluster(make)
    loop = loop_of(make, cluster, Measures(registry, (0,)))

    def failed() -> float | None:
        return registry.get_sample_value("mlora_operator_failed_passes")

    assert loop.failing is None
    assert failed() == 0
    cluster.broken = True
    async with running(loop):
        await until(loop, lambda: loop.failing is not None and loop.failing.times >= 3)
        assert loop.failing is not None
        assert loop.failing.words == "RuntimeError: the lines of an error"
        assert failed() >= 3  # type: ignore[operator]
        assert loop.last_pass > loop.failing.since  # they end, which is not enough
        cluster.broken = False
        await until(loop, lambda: loop.failing is None)
        assert failed() == 0


def test_the_first_of_the_failures_stays_known() -> None:
    first = failed_again(None, ValueError("a"), 10.0)
    second = failed_again(first, ValueError("b" * 10_000), 12.0)
    assert (second.since, second.times) == (10.0, 2)
    assert second.words.startswith("ValueError: bbb")
    assert len(second.words) <= 300


def reasons(api: Api) -> dict[str, Any]:
    return {
        name: {one["type"]: one["reason"] for one in status["conditions"]}
        for name, status in api.statuses.items()
        if "conditions" in status
    }


async def test_an_object_that_cannot_be_read_keeps_nobody_elses_from_being_decided_about(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Of one that was read before, that still holds."""
    odd, fine = (
        make.raw_task("odd", baseModel="nobody serves it"),
        make.raw_task("fine", baseModel="nor this"),
    )
    del odd["metadata"]["creationTimestamp"]
    registry = CollectorRegistry()
    cluster = Cluster(make, odd, fine)
    loop = loop_of(make, cluster, Measures(registry, (0,)))
    with caplog.at_level(logging.ERROR):
        assert await loop.step()
        assert await loop.step()
    assert list(reasons(cluster.api)) == ["fine"]
    told = [record for record in caplog.records if "cannot be reconciled" in record.message]
    assert [(record.message.split(" cannot")[0], record.exc_info is not None) for record in told] == [
        ("LoRATask team-a/odd", True)
    ]
    undecided = {
        kind: registry.get_sample_value("mlora_operator_undecided_objects", {"kind": kind})
        for kind in ("LoRATask", "LoRAPipeline")
    }
    assert undecided == {"LoRATask": 1, "LoRAPipeline": 0}
    cluster.tasks[0] = make.raw_task("odd", baseModel="nobody serves it")
    cluster.tasks[0]["metadata"]["resourceVersion"] = "2"
    assert await loop.step()
    assert set(reasons(cluster.api)) == {"fine", "odd"}
    assert registry.get_sample_value("mlora_operator_undecided_objects", {"kind": "LoRATask"}) == 0


async def test_an_object_whose_spec_cannot_be_checked_says_so_and_holds_up_nobody(
    make: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = decode.broken

    def broken(document: Any, rules: Any) -> Any:
        if document.get("lora", {}).get("rank") == 13 or document.get("stages") == 3:
            raise RecursionError("a rule that goes in a circle")
        return original(document, rules)

    monkeypatch.setattr(decode, "broken", broken)
    tasks = [make.raw_task("odd", lora={"rank": 13}), make.raw_task("fine", baseModel="nobody serves it")]
    pipelines = [make.raw_pipeline("odd-one", stages=3), make.raw_pipeline("good")]
    registry = CollectorRegistry()
    cluster = Cluster(make, *tasks, pipelines=pipelines)
    loop = loop_of(make, cluster, Measures(registry, (0,)))
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            assert await loop.step()
    assert reasons(cluster.api) == {
        "odd": {"Accepted": "ReconcileError"},
        "fine": {"Accepted": "NoPipelineForModel"},
        "odd-one": {"Ready": "ReconcileError"},
        "good": {"Ready": "Idle", "WorkersAvailable": "Idle"},
    }
    (accepted,) = cluster.api.statuses["odd"]["conditions"]
    assert accepted["status"] == "Unknown"
    assert "RecursionError: a rule that goes in a circle" in accepted["message"]
    told = [record for record in caplog.records if "cannot be reconciled" in record.message]
    assert len(told) == 2
    assert all(record.exc_info for record in told)
    for kind in ("LoRATask", "LoRAPipeline"):
        assert registry.get_sample_value("mlora_operator_undecided_objects", {"kind": kind}) == 1


async def test_what_stands_apart_is_said_in_the_log_and_in_the_condition(
    make: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = deciding.health

    def health(view: Any, *rest: Any) -> Any:
        if view.pipeline.key.name == "odd":
            raise OverflowError("int too large to convert to float")
        return original(view, *rest)

    monkeypatch.setattr(deciding, "health", health)
    cluster = Cluster(make, pipelines=[make.raw_pipeline("odd"), make.raw_pipeline("fine")])
    loop = loop_of(make, cluster)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            assert await loop.step()
    assert reasons(cluster.api)["odd"] == {"Ready": "ReconcileError"}
    assert reasons(cluster.api)["fine"]["Ready"] == "Idle"
    told = [record for record in caplog.records if "cannot be reconciled" in record.message]
    assert len(told) == 1
    assert "OverflowError: int too large" in told[0].message


async def test_a_status_whose_change_cannot_be_worked_out_holds_up_no_other(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = writer.difference

    def difference(before: Any, after: Any) -> Any:
        if any(" odd " in one.message for one in after.conditions):
            raise ValueError("odd")
        return original(before, after)

    monkeypatch.setattr(writer, "difference", difference)
    cluster = Cluster(make, make.raw_task("a", baseModel="odd"), make.raw_task("b", baseModel="other"))
    assert await loop_of(make, cluster).step()
    assert set(cluster.api.statuses) == {"b"}


@pytest.mark.parametrize(
    "event",
    [
        {},
        {"involvedObject": None},
        {"involvedObject": {"kind": "StatefulSet"}},
        {"involvedObject": {"kind": "StatefulSet", "namespace": "team-a"}},
        {"involvedObject": {"kind": "StatefulSet", "name": "mlora-toy"}},
        {"involvedObject": {"kind": "StatefulSet", "namespace": "team-a", "name": "x"}, "message": None},
        {
            "involvedObject": {"kind": "StatefulSet", "namespace": "team-a", "name": "x"},
            "lastTimestamp": None,
        },
    ],
    ids=str,
)
async def test_an_event_that_anybody_may_write_fails_no_pass(make: Any, event: dict[str, Any]) -> None:
    """The API server takes one that names no object."""
    whole = {
        "involvedObject": {"kind": "StatefulSet", "namespace": "team-a", "name": "y"},
        "lastTimestamp": "2026-03-01T12:00:00Z",
        "reason": "FailedCreate",
        "message": "no",
    }
    cluster = Cluster(make, make.raw_task("t", baseModel="nobody serves it"), events=[whole, event])
    assert await loop_of(make, cluster).step()
    assert set(cluster.api.statuses) == {"t"}
