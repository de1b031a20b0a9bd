"""What the watches have brought."""

from __future__ import annotations

from typing import Any

import pytest

from mlora_operator.reconcile.cluster.store import WatchedObjects


def body(uid: str, version: str = "1") -> dict[str, Any]:
    meta = {"uid": uid, "name": uid, "resourceVersion": version, "managedFields": [{"manager": "kubectl"}]}
    return {"metadata": meta, "spec": {"priority": 1}, "status": {"phase": "Running"}}


def test_each_object_is_there_once_as_it_was_seen_last() -> None:
    watched = WatchedObjects(["pods", "events"])
    pods = watched.of("pods")
    watched.saw("pods", None, body("a"))
    watched.saw("pods", "ADDED", body("b"))
    watched.saw("pods", "MODIFIED", body("a", "2"))
    assert [(one["metadata"]["uid"], one["metadata"]["resourceVersion"]) for one in pods()] == [
        ("a", "2"),
        ("b", "1"),
    ]
    watched.saw("pods", "DELETED", body("a", "3"))
    watched.saw("pods", "DELETED", body("never seen"))
    assert [one["metadata"]["uid"] for one in pods()] == ["b"]
    assert watched.of("events")() == []


def test_the_store_keeps_objects_as_they_were_cut_when_they_arrived() -> None:
    watched, given = WatchedObjects(["pods"]), body("a")
    watched.saw("pods", None, given)
    (held,) = watched.of("pods")()
    assert held == given
    assert held is not given


def test_a_kind_that_is_not_watched_is_an_error() -> None:
    with pytest.raises(KeyError):
        WatchedObjects(["pods"]).saw("nodes", None, body("a"))
