"""`mlora suspend`, `resume`, `retry` and `delete`: all of the named tasks are changed, or none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlora_operator.cli import exit_codes
from mlora_operator.cli.change import command
from mlora_operator.manifests.names import RETRY
from tests.fixtures.kube_server import KubeServer
from tests.fixtures.spoken import mlora


def ended(type_: str, **status: Any) -> dict[str, Any]:
    held = {"type": type_, "status": "True", "reason": "R", "message": ""}
    return {"state": type_, "conditions": [held], **status}


def spec(kube: KubeServer, name: str) -> dict[str, Any]:
    found: dict[str, Any] = kube.objects["loratasks", "team", name]["spec"]
    return found


def writes(kube: KubeServer) -> list[str]:
    return [method for method, _ in kube.asked if method != "GET"]


def test_tasks_are_suspended_and_resumed(kube: KubeServer) -> None:
    kube.task("a", {"state": "Training"})
    kube.task("b", {"state": "Queued"})
    said = mlora("suspend", "a", "b")
    assert (said.code, [line.split(";")[0] for line in said.out.splitlines()]) == (
        0,
        ["loratask/a suspended", "loratask/b suspended"],
    )
    assert spec(kube, "a")["suspend"] is spec(kube, "b")["suspend"] is True
    assert mlora("resume", "b").out.startswith("loratask/b resumed")
    assert (spec(kube, "a")["suspend"], spec(kube, "b")["suspend"]) == (True, False)


def test_what_is_so_already_is_not_written_again(kube: KubeServer) -> None:
    kube.task("held", suspend=True)
    kube.task("free")
    kube.task("done", ended("Succeeded"))
    for verb, name, words in (
        ("suspend", "held", "is suspended already"),
        ("suspend", "done", "has finished (Succeeded)"),
        ("resume", "free", "is not suspended"),
    ):
        said = mlora(verb, name)
        assert (said.code, said.out) == (0, "")
        assert f"loratask/{name} {words}" in said.err
    assert writes(kube) == []


def test_a_failed_task_is_retried_with_a_value_that_is_new_each_time(kube: KubeServer) -> None:
    kube.task("a", ended("Failed"))
    values = set()
    for _ in range(2):
        assert mlora("retry", "a").out.startswith("loratask/a retried")
        values.add(kube.objects["loratasks", "team", "a"]["metadata"]["annotations"][RETRY])
    assert len(values) == 2
    kube.task("held", ended("Failed"), suspend=True)
    assert "once it is resumed" in mlora("retry", "held").out


@pytest.mark.parametrize(
    ("status", "words"),
    [(ended("Succeeded"), "has succeeded"), ({"state": "Training"}, "has not failed: it is Training")],
)
def test_a_task_that_has_not_failed_is_not_retried_nor_is_any_beside_it(
    kube: KubeServer, status: dict[str, Any], words: str
) -> None:
    kube.task("failed", ended("Failed"))
    kube.task("other", status)
    said = mlora("retry", "failed", "other")
    assert said.code == exit_codes.INVALID
    assert f"loratask/other {words}" in said.err
    assert writes(kube) == []


@pytest.mark.parametrize("verb", ["suspend", "resume", "retry", "delete"])
def test_an_unknown_name_changes_nothing(kube: KubeServer, verb: str) -> None:
    kube.task("a", ended("Failed"), suspend=verb == "resume")
    said = mlora(verb, "a", "gone", *(["--yes"] if verb == "delete" else []))
    assert said.code == exit_codes.NOT_FOUND
    assert writes(kube) == []


def test_a_deletion_says_what_stays_in_the_store(kube: KubeServer) -> None:
    kube.task("done", ended("Succeeded", adapter={"uri": "s3://adapters/done"}))
    kube.task("half", {"state": "Training", "checkpointStep": 50})
    kube.task("new")
    said = mlora("delete", "--yes", "done", "half", "new")
    assert said.out.splitlines() == [
        "loratask/done deleted; its adapter stays at s3://adapters/done",
        "loratask/half deleted; its checkpoint of step 50 stays in s3://adapters/half/checkpoints, or where its pipeline "
        "keeps checkpoints",
        "loratask/new deleted; what it has written below s3://adapters/new stays",
    ]
    assert kube.objects == {}


@pytest.mark.parametrize(("typed", "code", "left"), [("y\n", 0, 0), ("n\n", 130, 1), ("", 130, 1)])
def test_a_terminal_is_asked_before_a_deletion(
    kube: KubeServer, monkeypatch: pytest.MonkeyPatch, typed: str, code: int, left: int
) -> None:
    monkeypatch.setattr(command, "is_terminal", lambda: True)
    kube.task("a")
    said = mlora("delete", "a", typed=typed)
    assert (said.code, len(kube.objects)) == (code, left)
    assert "loratask/a in namespace team" in said.err
    assert "Delete 1 task?" in said.err


def test_without_a_terminal_a_deletion_needs_yes(kube: KubeServer) -> None:
    kube.task("a")
    said = mlora("delete", "a")
    assert (said.code, kube.asked) == (exit_codes.INVALID, [])
    assert "--yes" in said.err


def test_programs_get_an_object_a_line(kube: KubeServer) -> None:
    kube.task("a")
    kube.task("b", suspend=True)
    found = [json.loads(line) for line in mlora("suspend", "a", "b", "a", "-o", "json").out.splitlines()]
    assert [(one["name"], one["changed"]) for one in found] == [("a", True), ("b", False)]
