"""The pages: each link leads somewhere, each table is one, each file that a page names is there."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
_FENCE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
# Where a page may leave the beginning of a path out.
_WITHIN = ("", "charts/mlora-operator", "operator/mlora_operator", "worker/mlora_worker", "examples")
_FILE = re.compile(
    r"`((?:tests|examples|charts|bench|docs|worker|operator|files|reconcile|stream|crds)/[\w./-]+\.\w+)`"
)


@cache
def prose(page: Path) -> str:
    """Without what stands in fences; lines keep their numbers."""
    return _FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), page.read_text())


@cache
def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    found: set[str] = set()
    seen: Counter[str] = Counter()
    for heading in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
        name = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        found.add(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading_of_it(page: Path) -> None:
    broken = []
    for number, line in enumerate(prose(page).splitlines(), 1):
        for link in _LINK.findall(line):
            file, _, anchor = link.partition("#")
            if link.startswith(("http://", "https://")):
                continue
            target = (page.parent / file).resolve() if file else page
            if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
                broken.append(f"{number}: {link}")
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_table_has_a_head_and_as_many_cells_in_each_row(page: Path) -> None:
    lines = prose(page).splitlines()
    wrong, cells = [], 0
    for number, line in enumerate(lines, 1):
        if not line.startswith("|"):
            cells = 0
            continue
        here = len(re.findall(r"(?<!\\)\|", line))
        if not cells:
            cells = here
            if number == len(lines) or not re.fullmatch(r"\|[\s:|-]+\|", lines[number]):
                wrong.append(f"{number}: no head: {line[:60]}")
        elif here != cells:
            wrong.append(f"{number}: {here - 1} cells, not {cells - 1}: {line[:60]}")
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_that_it_names_is_there(page: Path) -> None:
    missing = [
        name
        for name in _FILE.findall(page.read_text())
        if not name.startswith(("tests/cluster/.state", "bench/NAME"))
        and not any((ROOT / folder / name).exists() for folder in _WITHIN)
    ]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_has_marks_of_a_conflict(page: Path) -> None:
    assert re.findall(r"^(?:> )?(?:<{7}|={7}|>{7}).*", page.read_text(), re.MULTILINE) == []
