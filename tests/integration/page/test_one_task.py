"""The page of one task, and curves over each other, in a real browser."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from playwright.sync_api import Page, expect

from tests.fixtures.page_scene import INJECTED

from .conftest import Visit
from .contrast import LOWEST_CONTRAST

pytestmark = pytest.mark.integration

Open = Callable[..., Visit]
TICKETS = "?task=support%2Ftickets-de"
COMPARED = "?view=compare&compare=uid-support-tickets-de%2Cuid-support-tickets-en%2Cuid-legal-contracts-2026"


def focused(page: Page) -> str:
    return str(page.evaluate("document.activeElement.textContent"))


def test_a_name_leads_to_the_task_s_page_and_back_with_the_keyboard_alone(visit: Open) -> None:
    site = visit(query="?namespace=support")
    page = site.page
    page.locator("#training-rows a", has_text="tickets-de").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=2, name="support/tickets-de")).to_be_focused()
    assert page.url == f"{site.url}?namespace=support&task=support%2Ftickets-de"
    assert page.title() == "support/tickets-de · mLoRA"
    expect(page.locator("#board")).to_be_hidden()
    page.keyboard.press("Tab")
    page.keyboard.press("Shift+Tab")
    page.get_by_role("link", name="All tasks").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#training-rows tr")).to_have_count(3)
    assert page.url == f"{site.url}?namespace=support"
    page.go_back()
    expect(page.get_by_role("heading", level=2, name="support/tickets-de")).to_be_visible()
    assert site.complaints == []


def test_it_shows_progress_spec_data_conditions_events_and_its_part_of_the_timeline(visit: Open) -> None:
    site = visit(query=TICKETS)
    page = site.page
    expect(page.get_by_label("Command that fetches")).to_have_value(
        "mlora fetch tickets-de -n support --wait"
    )
    shown = page.locator("#task-view").inner_text()
    for words in ("Time to the last step", "1m28s", "148 / 240", "1.274"):
        assert words in shown, words
    for region, row in (
        ("Spec", "lora.rank 16"),
        ("Data", "Rows used 7,470"),
        ("Conditions", "Admitted True"),
    ):
        table = page.locator(f".wide[aria-label={region}]")
        assert row in table.inner_text().replace("\t", " ").replace("\n", " "), region
    assert "Admitted" in page.locator(".wide[aria-label=Events]").inner_text()
    expect(page.locator("#task-view .timeline svg")).to_be_visible()
    assert page.locator("#task-view .timeline .other").count() > 0
    assert "In the last 2032 ms of this pipeline" in page.locator("#task-view .timeline").inner_text()
    assert "12 forward, 12 backward" in page.locator("#task-view .timeline").inner_text()
    assert {url for url in site.requests if not url.startswith(site.url)} == set()


def test_the_command_is_copied_and_says_so(visit: Open) -> None:
    site = visit(query=TICKETS)
    page = site.page
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Copy").click()
    expect(page.get_by_text("Copied.")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == "mlora fetch tickets-de -n support --wait"


def test_where_a_page_may_not_copy_the_command_is_selected(visit: Open) -> None:
    page = visit(query=TICKETS).page
    page.evaluate("() => { navigator.clipboard.writeText = () => Promise.reject(new Error('no')); }")
    page.get_by_role("button", name="Copy").click()
    expect(page.get_by_text("Selected: copy it with the keyboard.")).to_be_visible()
    assert page.evaluate("getSelection().toString()") == "mlora fetch tickets-de -n support --wait"


def test_smoothing_draws_a_second_curve_and_stays_in_the_address(visit: Open) -> None:
    site = visit(query=TICKETS)
    page = site.page
    expect(page.locator("#task-view .curve")).to_have_count(1)
    expect(page.locator("#task-view .evaluated")).to_have_count(1)
    page.get_by_label("Smoothing").focus()
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    expect(page.locator("#task-view .curve")).to_have_count(2)
    assert page.url.endswith("smooth=20")
    assert page.evaluate("document.activeElement.type") == "range", "focus stays where it was"
    rough, smooth = (
        page.locator(f"#task-view .curve{kind}").get_attribute("d") for kind in (".raw", ":not(.raw)")
    )
    assert wobble(smooth) < wobble(rough)
    page.reload()
    expect(page.locator("#task-view .curve")).to_have_count(2)


def wobble(path: str | None) -> float:
    """How much a curve goes up and down."""
    assert path is not None
    heights = [float(point.split(" ")[1]) for point in path.removeprefix("M").split("L")]
    return sum(abs(after - before) for before, after in pairwise(heights))


def test_hostile_words_stay_text_on_a_task_s_page(visit: Open) -> None:
    site = visit(hostile=True, query="?task=support%2Fnightly-23")
    page = site.page
    expect(page.locator("#task-view .message")).to_contain_text(INJECTED)
    assert page.locator("main img, main script").count() == 0
    page.wait_for_timeout(300)
    assert page.title() == "support/nightly-23 · mLoRA"
    assert site.complaints == []


@pytest.mark.parametrize(
    "query",
    [
        "?task=javascript:alert(1)",
        "?task=support%2F%3Cimg%20src%3Dx%20onerror%3Dalert(1)%3E",
        "?view=compare&compare=javascript:alert(1)",
        "?search=%22%3E%3Cscript%3Ealert(1)%3C%2Fscript%3E&state=Queued&smooth=999",
        "?namespace=support&smooth=-1&view=javascript:alert(1)",
    ],
)
def test_whatever_stands_in_the_address_every_link_leads_to_the_page_itself(visit: Open, query: str) -> None:
    site = visit(waiting=2)
    page = site.page
    page.goto(site.url + query)
    page.wait_for_timeout(1500)
    targets = page.evaluate("[...document.links].map((link) => link.href)")
    assert targets
    assert {target.split("?")[0].split("#")[0] for target in targets} == {site.url}
    assert page.locator("main img, main script").count() == 0
    assert not [said for said in site.complaints if "400 (Bad Request)" not in said]


def test_a_task_that_does_not_exist_is_told_of(visit: Open) -> None:
    site = visit(waiting=2)
    site.page.goto(f"{site.url}?task=support%2Fnone")
    expect(site.page.locator("#notice")).to_contain_text("the task does not exist")
    site.page.get_by_role("link", name="All tasks").click()
    expect(site.page.locator("#status")).to_have_text("live")


def test_curves_that_are_chosen_lie_over_each_other_told_apart_by_more_than_colour(visit: Open) -> None:
    site = visit()
    page = site.page
    for name in ("support/tickets-de", "legal/contracts-2026"):
        page.get_by_label(f"Compare {name}").check()
    expect(page.locator("#chosen span")).to_have_text("2 of at most 8 curves are chosen.")
    page.get_by_role("link", name="Compare them").click()
    expect(page.get_by_role("heading", name="Curves over each other")).to_be_focused()
    expect(page.locator("#compare-view .chart .curve")).to_have_count(2)
    dashes = page.locator("#compare-view .chart .curve").evaluate_all(
        "nodes => nodes.map((node) => getComputedStyle(node).strokeDasharray)"
    )
    assert len(set(dashes)) == 2
    assert page.locator("#compare-view .letter").all_inner_texts() != []
    expect(page.locator(".compared li").first).to_contain_text("A support/tickets-de")
    expect(page.get_by_role("img", name="Loss by step: A from ")).to_be_visible()
    page.get_by_role("button", name="Remove support/tickets-de").click()
    expect(page.locator("#compare-view .chart .curve")).to_have_count(1)
    page.get_by_role("button", name="Remove legal/contracts-2026").click()
    expect(page.get_by_text("Choose curves on the page of all tasks.")).to_be_visible()
    assert site.complaints == []


def test_a_task_is_added_to_the_comparison_from_its_own_page(visit: Open) -> None:
    site = visit(query=f"{TICKETS}&compare=uid-legal-contracts-2026")
    page = site.page
    page.get_by_role("button", name="Add to the comparison").click()
    page.get_by_role("button", name="Compare with others").click()
    expect(page.locator(".compared li")).to_have_count(2)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("query", ["", TICKETS, COMPARED])
def test_it_fits_a_narrow_screen_and_its_words_stand_out(visit: Open, query: str, scheme: str) -> None:
    page = visit(query=query, scheme=scheme).page
    page.set_viewport_size({"width": 360, "height": 800})
    if query:
        page.wait_for_function("document.querySelector('.one .chart').viewBox.baseVal.width < 360")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.evaluate(LOWEST_CONTRAST) >= 4.5
