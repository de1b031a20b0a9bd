"""A reader finds tasks by namespace, state and words."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

from mlora_operator.page.service import PageService
from tests.fixtures.page_scene import INJECTED, Scene

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)


@pytest.fixture(scope="module")
def service() -> PageService:
    return PageService(Scene(NOW, hostile=True).board(), lambda: "", lambda: NOW)


def found(service: PageService, list_: str, **query: str) -> list[str]:
    answer = json.loads(service.tasks({"list": list_, "limit": "100", **query}).body)
    assert answer["total"] == len(answer["tasks"])
    return [f"{one['namespace']}/{one['name']}" for one in answer["tasks"]]


@pytest.mark.parametrize(
    ("search", "names"),
    [
        ("tickets", ["support/tickets-en", "support/tickets-de"]),
        ("TICKETS -de", ["support/tickets-de"]),
        ("llama", ["legal/contracts-2026", "support/summaries"]),
        ("support llama", ["support/summaries"]),
        ("support/tickets-e", ["support/tickets-en"]),
        (".*", []),
        ("\\", []),
    ],
)
def test_all_words_have_to_be_in_name_model_or_pipeline(
    service: PageService, search: str, names: list[str]
) -> None:
    assert found(service, "training", search=search) == names


def test_what_is_searched_for_is_text_and_no_pattern_and_may_be_markup(service: PageService) -> None:
    assert found(service, "finished", search="document.title='owned'") == [f"support/{INJECTED}"]


def test_a_state_a_namespace_and_words_are_asked_for_together(service: PageService) -> None:
    assert found(service, "waiting", state="Rejected") == ["research/mixtral-trial"]
    assert found(service, "waiting", state="Rejected", namespace="support") == []
    assert found(service, "waiting", search="nopipelineformodel") == ["research/mixtral-trial"]
    assert found(service, "finished", state="Failed", search="23") == ["support/nightly-23"]
    assert found(service, "training", state="queued") == [], "states are written as they are shown"


def test_curves_are_chosen_by_the_same_words(service: PageService) -> None:
    curves = json.loads(service.losses({"search": "gsm8k"}).body)
    assert {one["name"] for one in curves["curves"]} == {"gsm8k-r16", "gsm8k-r64"}
    assert curves["total"] == 2


def test_a_search_tells_nothing_of_other_namespaces(service: PageService) -> None:
    assert found(service, "training", search="contracts", namespace="support") == []
