"""The browser, and a page in it whose every request and every word on the console are remembered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from playwright.sync_api import Browser, Page

from mlora_operator.page.board import Board
from tests.fixtures.page_scene import Scene
from tests.fixtures.page_served import Leader, coordinator, endpoints_of, served, utc_now


@dataclass
class Visit:
    """A browser's page that looks at ``url``."""

    page: Page
    url: str
    scene: Scene
    board: Board
    leader: Leader
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)


@pytest.fixture
def visit(browser: Browser) -> Iterator[Callable[..., Visit]]:
    """``visit(waiting=31, hostile=False, scheme="light", query="")``: opened, and live."""
    with coordinator() as small:
        opened: list[Visit] = []
        stack: list[object] = []

        def open_page(
            *,
            waiting: int = 31,
            hostile: bool = False,
            scheme: str = "light",
            query: str = "",
            empty: bool = False,
        ) -> Visit:
            scene, leader = Scene(utc_now(), waiting=waiting, hostile=hostile), Leader()
            board = Board() if empty else scene.board(endpoints_of(scene, small))
            site = served(board, leader)
            url = site.__enter__()
            stack.append(site)
            page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
            one = Visit(page, url, scene, board, leader)
            page.on("request", lambda request: one.requests.append(request.url))
            page.on("console", lambda said: one.complaints.append(f"{said.type}: {said.text}"))
            page.on("pageerror", lambda error: one.complaints.append(str(error)))
            opened.append(one)
            page.goto(url + query)
            if not empty:
                page.locator("#status[data-is=live]").wait_for(timeout=20_000)
            return one

        yield open_page
        for one in opened:
            one.page.close()
        for site in stack:
            site.__exit__(None, None, None)  # type: ignore[attr-defined]
