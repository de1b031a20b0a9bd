"""Which state may follow which, tried out in many worlds; and the docs, which have the same states and events."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from mlora_operator.reconcile.decide import decide
from mlora_operator.reconcile.state.decode import read_task
from mlora_operator.reconcile.state.snapshot import Contact, Key, Snapshot
from mlora_operator.reconcile.status.conditions import FINAL, NEWS, UNFINISHED
from mlora_worker.protocol import Failure, FailureReason

PAGE = (Path(__file__).parents[4] / "docs" / "users" / "conditions.md").read_text()
T1 = Key("team-a", "t1")
PHASES = (None, "Preparing", "Prepared", "Training", "Preempted", "Saving", "Blocked", "Succeeded", "Failed")
LINKS = ("live", "lost", "starting", "none")


def worlds(make: Any) -> Iterator[tuple[dict[str, Any], Snapshot]]:
    """What a user may have written, and a world around it without the task."""
    users = ({}, {"suspend": True}, {"startDeadlineSeconds": 1}, {"retry": "again"})
    for user, phase, link in product(users, PHASES, LINKS):
        if (phase is None) != (link in ("starting", "none")):
            continue
        for capacity in (2**33, 2**20) if link == "live" else (2**33,):
            yield user, make.snapshot(group=make.group(), contact=contact(make, phase, link, capacity))
    yield {}, make.snapshot(group=make.group(), contact=Contact(report=make.report()))
    yield {}, make.snapshot()
    yield {}, make.snapshot(pipelines=())
    yield {"retry": "again"}, make.snapshot()


def contact(make: Any, phase: str | None, link: str, capacity: int) -> Contact:
    if link in ("starting", "none"):
        return Contact(starting=link == "starting")
    assert phase is not None
    blocked = Failure(reason=FailureReason.UPLOAD_FAILED, message="no")
    told = make.reported("Saving", blocked=blocked) if phase == "Blocked" else make.reported(phase, step=5)
    lost = {"lost_since": make.now, "error": "no answer"} if link == "lost" else {}
    return Contact(report=make.report(told, capacity=capacity), **lost)


def following(make: Any, *held: tuple[str, str, str], **status: Any) -> set[tuple[str, bool]]:
    """The states that follow in any world, and whether the user asked for another try; none where nothing is written."""
    conditions = [make.condition(*one) for one in held]
    before = {"pipeline": "team-a/toy", "conditions": conditions, **status}
    found = set()
    for user, world in worlds(make):
        spec = {name: value for name, value in user.items() if name != "retry"}
        raw = make.raw_task(status=before, **spec)
        raw["metadata"]["annotations"] = {"mlora.dev/retry": "again"} if "retry" in user else {}
        tasks = (read_task(raw, allow_file_uris=False),)
        after = decide(replace(world, tasks=tasks), make.settings(), make.now).task_statuses.get(T1)
        if after is not None:
            found.add((str(after.state), "retry" in user))
    return found


ACCEPTED, ADMITTED = ("Accepted", "True", "Accepted"), ("Admitted", "True", "Admitted")


def test_a_success_is_followed_by_nothing_in_any_world(make: Any) -> None:
    assert following(make, ACCEPTED, ("Succeeded", "True", "AdapterUploaded")) == set()


def test_a_failure_is_followed_by_another_try_alone(make: Any) -> None:
    states = following(make, ACCEPTED, ("Failed", "True", "InvalidRow"))
    assert states
    assert {state for state, _ in states} <= UNFINISHED
    assert all(asked for _, asked in states)


def test_one_that_trained_may_be_in_every_state_next(make: Any) -> None:
    trained = (ACCEPTED, ADMITTED, ("Running", "True", "Training"))
    states = {state for state, _ in following(make, *trained, startTime="2026-03-01T11:59:00Z", step=4)}
    assert states == (UNFINISHED | FINAL) - {"Preempted"}  # that needs another task: test_preemption.py


def rows(heading: str) -> list[list[str]]:
    """Cells of the first table below a heading of the page, without its head."""
    part = PAGE.partition(f"{heading}\n")[2]
    lines = re.search(r"(?:^\|.*\n)+", part, re.MULTILINE)
    assert lines is not None, heading
    return [[cell.strip() for cell in line.strip("|\n").split("|")] for line in lines[0].splitlines()[2:]]


def test_the_page_has_every_state_of_a_task() -> None:
    assert {row[0].strip("`") for row in rows("## LoRATask")} == UNFINISHED | FINAL


@pytest.mark.parametrize("kind", ["Normal", "Warning"])
def test_the_page_has_every_event(kind: str) -> None:
    told = {tuple(re.findall(r"`([^`]+)`", row[0])) for row in rows("## Events") if row[1] == kind}
    assert told == {news for news, its_kind in NEWS.items() if its_kind == kind}
