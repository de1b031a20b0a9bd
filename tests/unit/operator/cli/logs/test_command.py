"""`mlora logs`: what happened to a task, each thing once, in the order of time."""

from __future__ import annotations

import copy
import json
from typing import Any

from mlora_operator.cli import exit_codes
from tests.fixtures.kube_server import KubeServer
from tests.fixtures.spoken import mlora


def condition(type_: str, status: str, reason: str, message: str, second: int) -> dict[str, str]:
    moment = f"2026-01-01T00:00:{second:02}Z"
    return {
        "type": type_,
        "status": status,
        "reason": reason,
        "message": message,
        "lastTransitionTime": moment,
    }


def event(kube: KubeServer, name: str, reason: str, message: str, second: int, **further: Any) -> None:
    kube.has("events", name, {}).update(
        {
            "involvedObject": {"uid": "uid-a"},
            "reason": reason,
            "message": message,
            "lastTimestamp": f"2026-01-01T00:00:{second:02}Z",
            **further,
        }
    )


ACCEPTED = condition("Accepted", "True", "Accepted", "", 1)
ADMITTED = condition("Admitted", "False", "WaitingForMemory", "2 tasks come first", 5)
NOT_FAILED = condition("Failed", "False", "Training", "", 1)


def test_conditions_and_events_stand_in_the_order_of_time(kube: KubeServer) -> None:
    kube.task("a", {"pipeline": "ml/base", "conditions": [ADMITTED, NOT_FAILED, ACCEPTED]})
    event(kube, "e1", "CreatingPipeline", "the pipeline is made", 3)
    event(kube, "e2", "Retried", "again", 9, count=3, firstTimestamp="2026-01-01T00:00:02Z")
    event(kube, "e3", "WaitingForMemory", "2 tasks come first", 5)  # the condition says it
    kube.has("events", "other", {})["involvedObject"] = {"uid": "another"}
    said = mlora("logs", "a")
    assert said.out.splitlines() == [
        "2026-01-01 00:00:01  Accepted",
        "2026-01-01 00:00:03  CreatingPipeline: the pipeline is made",
        "2026-01-01 00:00:05  not Admitted (WaitingForMemory): 2 tasks come first",
        "2026-01-01 00:00:09  Retried: again (3 times since 2026-01-01T00:00:02Z)",
    ]
    assert "kubectl logs -n ml -l mlora.dev/pipeline=base" in said.err


def test_the_last_line_is_how_far_the_task_is(kube: KubeServer) -> None:
    kube.task("a", {"step": 6, "totalSteps": 10, "loss": "1.5", "conditions": [ACCEPTED]})
    found = [json.loads(line) for line in mlora("logs", "a", "-o", "json").out.splitlines()]
    assert [(one["kind"], one["text"]) for one in found] == [
        ("condition", "Accepted"),
        ("progress", "step 6/10, loss 1.5"),
    ]


def test_following_tells_only_what_is_new_and_ends_with_the_task(kube: KubeServer) -> None:
    task = kube.task("a", {"state": "Queued", "conditions": [ACCEPTED]})
    later = copy.deepcopy(task)
    failed = condition("Failed", "True", "InvalidRow", "line 7 has no answer", 30)
    finished = condition("Finished", "True", "Failed", "line 7 has no answer", 30)
    later["status"] = {
        "state": "Failed",
        "conditions": [ACCEPTED, finished, failed],
        "step": 2,
        "totalSteps": 9,
    }
    kube.turns = [later]
    said = mlora("logs", "a", "--follow")
    assert said.code == exit_codes.FAILED
    *lines, progress = [line.partition("  ")[2] for line in said.out.splitlines()]
    assert lines == ["Accepted", "Failed (InvalidRow): line 7 has no answer"]
    assert progress == "step 2/9"


def test_following_can_be_given_up(kube: KubeServer) -> None:
    kube.task("a", {"state": "Queued", "conditions": [ACCEPTED]})
    said = mlora("logs", "a", "--follow", "--timeout", "1s")
    assert said.code == exit_codes.TIMEOUT
    assert "had not finished after 1 seconds" in said.err


def test_a_user_who_may_not_see_events_sees_the_conditions(kube: KubeServer) -> None:
    kube.task("a", {"conditions": [ACCEPTED]})
    kube.refused.add("events")
    said = mlora("logs", "a")
    assert (said.code, said.out) == (0, "2026-01-01 00:00:01  Accepted\n")


def test_events_that_the_cluster_fails_to_read_are_not_taken_for_none(kube: KubeServer) -> None:
    kube.task("a", {"conditions": [ACCEPTED]})
    kube.broken.add("events")
    said = mlora("logs", "a")
    assert (said.code, said.out) == (exit_codes.UNREACHABLE, "")
    assert "cannot list events" in said.err
