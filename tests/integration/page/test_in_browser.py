"""The page in a real browser, headless Chromium: what people see, and what their browser does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from mlora_operator.reconcile.state.decision import Decision
from mlora_operator.reconcile.state.snapshot import Snapshot
from tests.fixtures.page_scene import INJECTED, SMALL

from .conftest import Visit
from .contrast import LOWEST_CONTRAST

pytestmark = pytest.mark.integration

Open = Callable[..., Visit]


def rows(page: Page, list_: str) -> list[str]:
    return [
        row.inner_text().replace("\n", " ").replace("\t", " | ")
        for row in page.locator(f"#{list_}-rows tr").all()
    ]


def test_it_shows_queue_training_and_finished_and_asks_nobody_but_the_operator(visit: Open) -> None:
    site = visit()
    page = site.page
    queue = rows(page, "waiting")
    assert len(queue) == 25
    assert queue[0].startswith("1 | ")
    assert any("WaitingForMemory" in row and "would need" in row for row in queue)
    assert "s3://adapters/support/nightly-20" in rows(page, "finished")[0]
    assert "148 / 240" in " ".join(rows(page, "training"))
    expect(page.locator("#queue-title")).to_have_text("Queue32")
    expect(page.locator(".pipeline")).to_have_count(3)
    expect(page.get_by_text("CoordinatorUnreachable")).to_be_visible()
    expect(page.locator("#losses svg")).to_have_count(6)
    page.get_by_text("Timeline").first.click()
    page.locator(".timeline svg").wait_for()
    assert site.complaints == []
    assert {url for url in site.requests if not url.startswith(site.url)} == set()


def test_names_and_messages_with_markup_are_shown_as_text(visit: Open) -> None:
    site = visit(hostile=True)
    page = site.page
    shown = rows(page, "finished")
    assert INJECTED in shown[0]
    assert any(INJECTED in row and "InvalidRow" in row for row in shown)
    assert page.locator("main img, main script").count() == 0
    page.wait_for_timeout(300)
    assert page.title() == "mLoRA"
    assert site.complaints == []


def test_a_namespace_in_the_address_or_the_choice_filters_all_lists(visit: Open) -> None:
    site = visit(query="?namespace=support")
    page = site.page
    assert all(
        "support/" in row for list_ in ("waiting", "training", "finished") for row in rows(page, list_)
    )
    assert "legal" not in page.locator("main").inner_text()
    page.locator("#namespace").select_option("")
    expect(page.locator("#training-rows tr")).to_have_count(6)
    page.locator("#namespace").select_option("legal")
    expect(page.locator("#training-rows tr")).to_have_count(1)
    assert page.url.endswith("?namespace=legal")


def test_all_that_can_be_done_can_be_done_with_the_keyboard(visit: Open) -> None:
    site = visit()
    page = site.page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    reached = []
    for _ in range(24):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("(document.activeElement.id || document.activeElement.textContent)"))
    sections = ["Pipelines", "Training", "Queue", "Finished", "Namespaces"]
    assert reached[:8] == [*sections, "search", "state", "namespace"]
    assert reached.count("Timeline") == 3
    page.locator("summary").first.focus()
    page.keyboard.press("Enter")
    page.locator(".timeline svg").first.wait_for()
    outline = page.locator("summary").first.evaluate("node => getComputedStyle(node).outlineStyle")
    assert outline == "solid"
    page.get_by_role("button", name="Next page of queue").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#waiting-pager span")).to_have_text("26–32 of 32")
    assert page.evaluate("document.activeElement.textContent") == "Next", "focus stays where it was"


def test_a_look_that_brings_news_leaves_focus_and_open_timelines_alone(visit: Open) -> None:
    site = visit()
    page = site.page
    page.locator("summary").first.focus()
    page.keyboard.press("Enter")
    site.board.watch(Snapshot(contacts=site.scene.contacts(0.5)), Decision())
    object.__setattr__(site.scene, "tasks", site.scene.tasks[1:])
    site.scene.watch(site.board)
    expect(page.locator("#training-rows tr")).to_have_count(5, timeout=10_000)
    assert page.evaluate("document.activeElement.textContent") == "Timeline"
    assert page.locator("details").first.evaluate("node => node.open")


def test_a_screen_reader_finds_landmarks_headers_and_words_for_pictures(visit: Open) -> None:
    page = visit().page
    for role in ("banner", "navigation", "main"):
        assert page.get_by_role(role).count() == 1, role
    for name in ("Pipelines", "Training", "Queue", "Finished", "Namespaces"):
        assert page.get_by_role("heading", name=name).count() >= 1
    assert page.get_by_role("columnheader", name="Why it waits").count() == 1
    assert page.get_by_role("rowheader", name="support/tickets-de").count() == 1
    assert page.get_by_role("progressbar", name="Steps of tickets-de").count() == 1
    assert page.get_by_role("img", name="Loss of support/tickets-de: from ").count() == 1
    assert page.get_by_role("img", name="used 4.82 GiB, predicted ").count() == 1
    assert page.locator("svg:not([role=img]):not([role=img] *)").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_follows_the_reader_s_mode_and_its_words_stand_out(visit: Open, scheme: str) -> None:
    page = visit(scheme=scheme).page
    brightness = (
        "(name => getComputedStyle(document.body)[name].match(/\\d+/g).slice(0, 3)"
        ".reduce((sum, part) => sum + Number(part) / 3, 0))"
    )
    ground, ink = page.evaluate(f"{brightness}('backgroundColor')"), page.evaluate(f"{brightness}('color')")
    assert (ground < 60 and ink > 200) if scheme == "dark" else (ground > 200 and ink < 60)
    assert page.evaluate(LOWEST_CONTRAST) >= 4.5


def test_a_task_has_one_colour_in_table_curve_and_timeline(visit: Open) -> None:
    page = visit().page
    page.get_by_text("Timeline").first.click()
    page.locator(".timeline svg").first.wait_for()
    colour = "node => getComputedStyle(node).backgroundColor"
    for one in SMALL:
        name = f"{one.namespace}/{one.name}"
        places = [
            page.locator(f"tr:has(th[title='{name}']) .chip"),
            page.locator(f"figure:has([title='{name}']) .chip"),
            page.locator(".legend li", has_text=name).locator(".chip"),
        ]
        assert len({place.evaluate(colour) for place in places}) == 1
        assert page.locator(f"figure:has([title='{name}']) .curve").evaluate(
            "node => getComputedStyle(node).stroke"
        ) == places[0].evaluate(colour)


def test_a_replica_that_follows_says_who_leads_and_an_operator_that_ended_is_missed(visit: Open) -> None:
    site = visit(waiting=2)
    page = site.page
    site.leader.name = "operator-b"
    site.board.clear()
    expect(page.locator("#notice")).to_contain_text("operator-b", timeout=15_000)
    expect(page.locator("#status")).to_have_text("follows")
    assert len(rows(page, "training")) == 6, "what was known stays in sight"
    site.scene.watch(site.board)
    expect(page.locator("#status")).to_have_text("live", timeout=15_000)
    expect(page.locator("#notice")).to_be_hidden()
    page.route("**/api/**", lambda route: route.abort())
    expect(page.locator("#notice")).to_contain_text("does not respond", timeout=15_000)


def test_a_proxy_that_asks_to_sign_in_again_is_told_from_an_operator(visit: Open) -> None:
    page = visit(waiting=1).page
    page.route(
        "**/api/**",
        lambda route: route.fulfill(status=200, content_type="text/html", body="<form>sign in</form>"),
    )
    expect(page.locator("#notice")).to_contain_text("sign in again", timeout=15_000)


def test_before_the_first_pass_and_without_tasks_it_says_so(visit: Open) -> None:
    site = visit(empty=True)
    expect(site.page.locator("#notice")).to_contain_text("no data yet", timeout=15_000)
    site.board.watch(Snapshot(), Decision())
    for words in (
        "There is no pipeline.",
        "No task is training.",
        "No task is waiting.",
        "No task has finished.",
    ):
        expect(site.page.get_by_text(words)).to_be_visible(timeout=15_000)


def test_two_thousand_tasks_are_turned_page_by_page(visit: Open) -> None:
    site = visit(waiting=2000)
    page = site.page
    expect(page.locator("#waiting-pager span")).to_have_text("1–25 of 2,001")
    page.get_by_role("button", name="Next page of queue").click()
    expect(page.locator("#waiting-pager span")).to_have_text("26–50 of 2,001")
    assert rows(page, "waiting")[0].startswith("26 | ")
    assert page.locator("*").count() < 3000


def test_a_page_that_nothing_happens_to_gets_answers_without_a_body(visit: Open) -> None:
    site = visit(waiting=3)
    statuses: list[int] = []
    site.page.on("response", lambda response: statuses.append(response.status))
    site.scene.watch(site.board)  # a pass, as there is one every few seconds
    site.page.wait_for_timeout(5000)
    assert len(statuses) >= 5
    assert set(statuses) == {304}


def test_words_and_a_state_filter_all_lists_and_stay_in_the_address(visit: Open) -> None:
    site = visit(query="?namespace=support")
    page = site.page
    page.locator("#search").fill("sweep-000 llama")
    expect(page.locator("#queue-title")).to_have_text("Queue3")
    expect(page.get_by_text("No task in training matches.")).to_be_visible()
    page.locator("#state").select_option("Training")
    expect(page.locator("#queue-title")).to_have_text("Queue0")
    page.locator("#state").select_option("Queued")
    expect(page.locator("#queue-title")).to_have_text("Queue3")
    assert page.url == f"{site.url}?namespace=support&state=Queued&search=sweep-000+llama"
    page.reload()
    expect(page.locator("#queue-title")).to_have_text("Queue3")
    expect(page.locator("#search")).to_have_value("sweep-000 llama")
    expect(page.locator("#state")).to_have_value("Queued")
    expect(page.get_by_text("Only tasks in state Queued with “sweep-000 llama” are listed.")).to_be_visible()
    page.get_by_role("button", name="Show all").click()
    expect(page.locator("#search")).to_be_focused()
    expect(page.locator("#search")).to_have_value("")
    expect(page.locator("#training-rows tr")).to_have_count(3)
    assert page.url == f"{site.url}?namespace=support"
    assert site.complaints == []


def test_time_to_the_last_step_and_use_by_namespace_are_shown(visit: Open) -> None:
    page = visit().page
    assert "1m28s" in next(row for row in rows(page, "training") if "tickets-de" in row)
    expect(page.locator("#namespaces-title")).to_have_text("Namespaces3")
    assert rows(page, "namespaces")[0].startswith("support | 3 | ")
    page.locator("#namespaces-rows").get_by_role("link", name="legal").click()
    expect(page.locator("#training-rows tr")).to_have_count(1)
    expect(page.locator("#namespace")).to_have_value("legal")
