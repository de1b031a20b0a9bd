"""Who asks again gets the same answer with the same tag, and what is asked wrongly is refused."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

from mlora_operator.page.board import Board
from mlora_operator.page.service import AT_MOST_EVERY, PageService, RequestError
from mlora_operator.reconcile.ports import Endpoint
from mlora_operator.reconcile.state.snapshot import Key
from tests.fixtures.page_scene import Scene

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)


class Clock:
    def __init__(self) -> None:
        self.moment = 100.0

    def __call__(self) -> float:
        return self.moment


@pytest.fixture
def scene() -> Scene:
    return Scene(NOW, waiting=5)


def test_a_pass_that_changed_nothing_keeps_the_tag_and_one_that_did_does_not(scene: Scene) -> None:
    board, clock = scene.board(), Clock()
    service = PageService(board, lambda: "", lambda: NOW, clock)
    tags = []
    for tasks in (scene.tasks, scene.tasks, scene.tasks[1:]):
        scene.tasks = tasks
        scene.watch(board)
        clock.moment += AT_MOST_EVERY
        tags.append(
            (service.overview({}).etag, service.tasks({"list": "training"}).etag, service.losses({}).etag)
        )
    assert tags[0] == tags[1]
    assert all(before != after for before, after in zip(tags[1], tags[2], strict=True))


def test_passes_that_follow_each_other_fast_are_looked_at_no_faster(scene: Scene) -> None:
    board, clock = scene.board(), Clock()
    service = PageService(board, lambda: "", lambda: NOW, clock)
    first = service.overview({})
    scene.tasks = scene.tasks[1:]
    scene.watch(board)
    assert service.overview({}) is first
    clock.moment += AT_MOST_EVERY
    assert service.overview({}) != first


def test_a_crowd_of_tasks_that_takes_long_to_put_in_order_is_looked_at_less_often(scene: Scene) -> None:
    board, clock = scene.board(), Clock()

    def slow() -> datetime:  # asked once for each order
        clock.moment += 1.0
        return NOW

    service = PageService(board, lambda: "", slow, clock)
    first = service.overview({})
    for waited, same in ((2.0, True), (2.0, False)):
        scene.tasks = scene.tasks[1:]
        scene.watch(board)
        clock.moment += waited
        assert (service.overview({}) is first) is same


def test_many_questions_take_no_more_memory_than_some(scene: Scene) -> None:
    service = PageService(scene.board(), lambda: "", lambda: NOW)
    for offset in range(500):
        service.tasks({"offset": f"{offset}"})
    assert len(service._made) <= 64


@pytest.mark.parametrize(("leader", "error"), [("operator-7f-x2", "following"), ("", "starting")])
def test_without_a_pass_the_reader_is_told_why(leader: str, error: str) -> None:
    service = PageService(Board(), lambda: leader, lambda: NOW)
    for ask in (
        service.overview,
        service.tasks,
        service.task,
        service.losses,
        service.namespaces,
        service.coordinator,
    ):
        with pytest.raises(RequestError) as refused:
            ask({"pipeline": "a/b", "task": "a/b"})
        assert (refused.value.status, refused.value.trouble.error) == (503, error)
        assert refused.value.trouble.leader == (leader or None)


def test_one_who_leads_no_longer_shows_nothing_old(scene: Scene) -> None:
    board = scene.board()
    service = PageService(board, lambda: "another", lambda: NOW)
    service.overview({})
    board.clear()
    with pytest.raises(RequestError):
        service.overview({})
    scene.watch(board)  # it leads again
    assert json.loads(service.losses({}).body)["curves"], "losses of before are still there"


@pytest.mark.parametrize(
    "query",
    [
        {"list": "secrets"},
        {"offset": "-1"},
        {"offset": "9999999"},
        {"offset": "1e3"},
        {"offset": "١"},
        {"limit": "0"},
        {"limit": "101"},
        {"namespace": "a/b"},
        {"namespace": "<script>"},
        {"namespace": "x" * 64},
        {"state": ""},
        {"state": "<b>"},
        {"state": "x" * 41},
        {"search": "x" * 101},
    ],
)
def test_a_question_out_of_bounds_is_refused(scene: Scene, query: dict[str, str]) -> None:
    with pytest.raises(RequestError) as refused:
        PageService(scene.board(), lambda: "", lambda: NOW).tasks(query)
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ({}, 400),
        ({"task": "support"}, 400),
        ({"task": "../../x"}, 400),
        ({"task": "support/<script>"}, 400),
        ({"task": "support/none"}, 404),
        ({"task": "legal/contracts-2026", "namespace": "support"}, 404),
    ],
)
def test_a_task_that_is_not_there_or_not_the_reader_s_is_refused_alike(
    scene: Scene, query: dict[str, str], status: int
) -> None:
    service = PageService(scene.board(), lambda: "", lambda: NOW)
    with pytest.raises(RequestError) as refused:
        service.task(query)
    assert refused.value.status == status
    if status == 404:
        assert refused.value.trouble.message == "the task does not exist"


def test_an_answer_that_is_kept_for_all_is_none_for_a_reader_of_another_namespace(scene: Scene) -> None:
    service = PageService(scene.board(), lambda: "", lambda: NOW)
    assert service.task({"task": "legal/contracts-2026"}).body
    with pytest.raises(RequestError) as refused:
        service.task({"task": "legal/contracts-2026", "namespace": "support"})
    assert refused.value.status == 404


@pytest.mark.parametrize("uids", ["", "a,,b", "a b", "<script>", ",".join("abcdefghi"), "x" * 65])
def test_curves_are_asked_for_by_a_few_uids(scene: Scene, uids: str) -> None:
    with pytest.raises(RequestError) as refused:
        PageService(scene.board(), lambda: "", lambda: NOW).losses({"uids": uids})
    assert refused.value.status == 400


def test_the_named_curves_come_in_their_order_and_none_of_another_namespace(scene: Scene) -> None:
    service = PageService(scene.board(), lambda: "", lambda: NOW)
    uids = "uid-support-tickets-en,uid-legal-contracts-2026,uid-support-tickets-de,gone"
    found = json.loads(service.losses({"uids": uids}).body)["curves"]
    assert [one["name"] for one in found] == ["tickets-en", "contracts-2026", "tickets-de"]
    own = json.loads(service.losses({"uids": uids, "namespace": "support"}).body)["curves"]
    assert [one["name"] for one in own] == ["tickets-en", "tickets-de"]


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ({}, 400),
        ({"pipeline": "mlora-system"}, 400),
        ({"pipeline": "../x"}, 400),
        ({"pipeline": "mlora-system/none"}, 404),
        ({"pipeline": "mlora-system/smollm2-135m", "namespace": "elsewhere"}, 404),
        ({"pipeline": "platform/llama-3.1-8b"}, 504),
    ],
)
def test_a_timeline_that_is_not_there_is_refused(scene: Scene, query: dict[str, str], status: int) -> None:
    board = scene.board({scene.small.key: Endpoint("http://10.1.2.3:8080", "token")})
    with pytest.raises(RequestError) as refused:
        PageService(board, lambda: "", lambda: NOW).coordinator(query)
    assert refused.value.status == status


def test_a_timeline_of_a_pipeline_that_serves_the_reader_s_tasks_is_given(scene: Scene) -> None:
    endpoint = Endpoint("http://10.1.2.3:8080", "token")
    service = PageService(scene.board({scene.small.key: endpoint}), lambda: "", lambda: NOW)
    found = service.coordinator({"pipeline": "mlora-system/smollm2-135m", "namespace": "support"})
    assert found == (Key("mlora-system", "smollm2-135m"), endpoint, 2)
