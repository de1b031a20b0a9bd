"""The documentation's figures and table are those that the code makes now."""

from __future__ import annotations

from pathlib import Path

from bench.pipeline_sim.figures import figures, table

DOCS = Path(__file__).parents[4] / "docs"
AGAIN = "run: python -m bench.pipeline_sim.figures docs/images"


def test_the_committed_figures_are_up_to_date() -> None:
    for name, picture in figures().items():
        assert (DOCS / "images" / name).read_text() == picture, f"{name}: {AGAIN}"


def test_the_page_shows_every_figure_and_the_table() -> None:
    page = (DOCS / "contributors" / "lorapp.md").read_text()
    for name in figures():
        assert f"(../images/{name})" in page
    assert table() in page, AGAIN
