"""What each namespace has of the pipelines."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from mlora_operator.page.service import PageService
from tests.fixtures.page_scene import LARGE, SMALL, Scene

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)


def asked(**query: str) -> dict[str, Any]:
    service = PageService(Scene(NOW, waiting=6).board(), lambda: "", lambda: NOW)
    return json.loads(service.namespaces(query).body)  # type: ignore[no-any-return]


def test_those_with_most_tasks_in_training_come_first_with_what_they_have() -> None:
    rows = asked()["namespaces"]
    assert [one["namespace"] for one in rows] == ["support", "research", "legal"]
    support = rows[0]
    assert [support[name] for name in ("training", "waiting", "succeeded", "failed")] == [3, 2, 4, 1]
    speeds = sum(one.speed for one in (*SMALL, *LARGE) if one.namespace == "support")
    assert support["tokensPerSecond"] == speeds


def test_tokens_are_those_of_the_steps_that_were_done() -> None:
    scene_rows = {one["namespace"]: one for one in asked()["namespaces"]}
    each = 1_660_000 / 7470  # tokens of a row
    assert scene_rows["legal"]["trainedTokens"] == round(512 * 16 * each)
    assert scene_rows["support"]["trainedTokens"] == round(((148 + 171) * 8 + 37 * 16) * each)


def test_they_are_turned_page_by_page() -> None:
    second = asked(offset="1", limit="1")
    assert (second["total"], second["offset"]) == (3, 1)
    assert [one["namespace"] for one in second["namespaces"]] == ["research"]


def test_a_reader_of_one_namespace_sees_that_one() -> None:
    assert [one["namespace"] for one in asked(namespace="legal")["namespaces"]] == ["legal"]
    assert asked(namespace="nobody") == {"version": "v1", "total": 0, "offset": 0, "namespaces": []}
