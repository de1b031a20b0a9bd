"""The first page shows the operator's page and a schedule; the indexes lead to every page."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()


def test_it_shows_the_page_and_a_schedule_and_says_which_cluster_is_invented() -> None:
    _, picture, after = README.partition("](docs/images/page-light.png)")
    assert picture
    assert "invented" in after.lstrip(")\n").partition("\n\n")[0]
    assert "](docs/images/schedules.svg)" in README


def test_its_quick_start_is_two_commands_that_the_makefile_has() -> None:
    targets = (ROOT / "Makefile").read_text()
    for target in ("demo-local", "demo"):
        assert f"\nmake {target} " in README
        assert f"\n{target}:" in targets


def test_it_leads_to_the_limits_and_does_not_repeat_them() -> None:
    assert "(docs/users/limits.md)" in README
    assert "mixtures of experts" not in README
    assert "mixtures of experts" in (ROOT / "docs" / "users" / "limits.md").read_text()


@pytest.mark.parametrize("folder", ["users", "operators", "contributors"])
def test_an_index_lists_every_page_beside_it(folder: str) -> None:
    index = (ROOT / "docs" / folder / "index.md").read_text()
    pages = {page.name for page in (ROOT / "docs" / folder).glob("*.md")} - {"index.md"}
    assert sorted(page for page in pages if f"({page})" not in index) == []


@pytest.mark.parametrize("page", ["README.md", "docs/operators/page.md"])
def test_a_picture_of_the_page_says_that_its_cluster_is_invented(page: str) -> None:
    text = (ROOT / page).read_text()
    assert "page-light.png" in text
    assert "invented" in text
