"""Who deletes tasks that are done was served all the same."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from mlora_operator.reconcile.admission import deleted_tasks
from mlora_operator.reconcile.admission.deleted_tasks import DeletedTasks
from mlora_operator.reconcile.decide import decide
from mlora_operator.reconcile.loop import Loop
from mlora_operator.reconcile.state.snapshot import ServedTokens
from tests.unit.operator.reconcile.test_failing_passes import Cluster
from tests.unit.operator.reconcile.test_impossible_workers import NoCoordinators
from tests.unit.operator.reconcile.test_preemption import BIG, TOY, _finished, admitted, contact

HERE = "team-a/toy"


def test_what_was_served_is_known_once_the_task_is_gone_and_not_before(make: Any) -> None:
    known = DeletedTasks()
    done, other = _finished(make, "team-b", ago=60), make.task("other", "team-b")
    assert known.seen([done, other], [HERE], make.now) == {}
    ended = make.now - timedelta(seconds=60)
    expected = {HERE: (ServedTokens("team-b", 50 * 4 * 200, ended, ended),)}
    assert known.seen([], [HERE], make.now) == expected, "and nothing of one that never had a place"
    assert known.seen([], [HERE], make.now) == expected
    assert known.seen([], [], make.now) == {}, "its pipeline is gone, too"


async def test_the_loop_knows_of_tasks_that_are_gone(make: Any) -> None:
    status = _finished(make, "team-b").status.model_dump(by_alias=True, mode="json", exclude_none=True)
    raw = make.raw_task("done", "team-b", training={"batchSize": 4}, status=status)
    cluster, seen = Cluster(make, raw, pipelines=[make.raw_pipeline()]), []
    loop = Loop(
        cluster,
        NoCoordinators(),  # type: ignore[arg-type]
        make.settings(),
        now=lambda: make.now,
        watchers=[lambda snapshot, _: seen.append(snapshot.deleted)],
    )
    await loop.step()
    cluster.tasks.clear()
    await loop.step()
    assert [{key: [one.tokens for one in kept] for key, kept in deleted.items()} for deleted in seen] == [
        {},
        {HERE: [50 * 4 * 200]},
    ]


def test_one_that_is_deleted_while_it_trains_counts_as_far_as_it_had_come(make: Any) -> None:
    status = {
        "pipeline": HERE,
        "step": 7,
        "totalSteps": 50,
        "startTime": "2026-03-01T11:00:00Z",
        "data": {"rows": 100, "used": 100, "tokens": 20_000},
    }
    known = DeletedTasks()
    known.seen([make.task("t", "team-b", training={"batchSize": 4}, status=status)], [HERE], make.now)
    (one,) = known.seen([], [HERE], make.now)[HERE]
    assert (one.tokens, one.start, one.end) == (7 * 4 * 200, make.now - timedelta(hours=1), make.now)


def test_many_are_counted_together_and_nothing_is_lost(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deleted_tasks, "MOST", 3)
    known = DeletedTasks()
    for ago in range(9, 0, -1):
        known.seen([_finished(make, "team-b", ago=ago)], [HERE], make.now)
        found = known.seen([], [HERE], make.now)[HERE]
    assert len(found) == 3
    assert sum(one.tokens for one in found) == 9 * 50 * 4 * 200
    assert found[0].end - found[0].start == timedelta(seconds=6)


def test_a_namespace_that_deletes_what_is_done_does_not_go_first_for_that(make: Any) -> None:
    tasks = (
        make.task("first", "team-b", training=BIG, age=50),
        make.task("second", "team-c", training=BIG, age=1),
    )
    said = contact(
        make,
        *(make.reported("Prepared", one.key.name, one.key.namespace) for one in tasks),
    )
    pipelines = (make.pipeline(allowedNamespaces={"from": "All"}),)
    known = DeletedTasks()
    known.seen([_finished(make, "team-b")], [HERE], make.now)
    for deleted, expected in (({}, "first"), (known.seen([], [HERE], make.now), "second")):
        snapshot = make.snapshot(
            *tasks, group=make.group(), contact=said, pipelines=pipelines, deleted=deleted
        )
        made = decide(snapshot, make.settings(serving={"namespaces": ["team-a"]}), make.now)
        assert [name for name, inside in admitted(made.plans[TOY]).items() if inside] == [expected]
