"""Files and folders of the source that a page names are in the tree."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SOURCES = ("operator", "worker", "tests", "bench", "examples", "charts")
# Scripts of llama.cpp, and a place holder.
ELSEWHERE = {"convert_lora_to_gguf.py", "convert_hf_to_gguf.py", "bench/NAME.py"}
_CODE = re.compile(r"`([^`\n]+)`")
_FILE = re.compile(r"[\w./-]*\w\.py\b")
_FOLDER = re.compile(r"(?:\w+/)+")


@cache
def tree() -> tuple[frozenset[str], frozenset[str]]:
    """Files and folders, each by every path that ends at it: ``a/b.py`` is also ``b.py``."""
    files: set[str] = set()
    folders: set[str] = set()
    for path in (path for source in SOURCES for path in (ROOT / source).rglob("*.py")):
        parts = path.relative_to(ROOT).parts
        files.update("/".join(parts[start:]) for start in range(len(parts)))
        for end in range(1, len(parts)):
            folders.update("/".join(parts[start:end]) for start in range(end))
    return frozenset(files), frozenset(folders)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_python_file_that_a_page_names_is_there(page: Path) -> None:
    files, _ = tree()
    named = {name for code in _CODE.findall(page.read_text()) for name in _FILE.findall(code)}
    assert sorted(named - files - ELSEWHERE) == []


@pytest.mark.parametrize(
    "page",
    [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs" / "contributors").rglob("*.md"))],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_every_folder_that_a_page_for_contributors_names_is_there(page: Path) -> None:
    _, folders = tree()
    named = {code for code in _CODE.findall(page.read_text()) if _FOLDER.fullmatch(code)}
    assert sorted(name for name in named if name.rstrip("/") not in folders) == []


def test_the_picture_of_the_rooms_has_every_room() -> None:
    page = (ROOT / "docs" / "contributors" / "architecture.md").read_text()
    picture = page.partition("## The rooms")[2].partition("### Operator")[0]
    rooms = {
        path.parent.name
        for house in ("operator/mlora_operator", "operator/mlora_operator/reconcile", "worker/mlora_worker")
        for path in (ROOT / house).glob("*/__init__.py")
    }
    assert sorted(room for room in rooms if not re.search(rf"\b{room}\b", picture)) == []


@pytest.mark.parametrize(
    "contract",
    [
        "Operator rooms, from the edge to the core",
        "Worker rooms, from the edge to the core",
        "Rooms of reconcile, from the edge to the core",
        "Rooms of the coordinator",
        "Rooms of data",
    ],
)
def test_the_picture_has_the_rooms_in_the_order_of_the_contract(contract: str) -> None:
    page = (ROOT / "docs" / "contributors" / "architecture.md").read_text()
    picture = page.partition("## The rooms")[2].partition("### Operator")[0].splitlines()
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [one["layers"] for one in contracts if one["name"] == contract]
    names = [{module.rpartition(".")[2] for module in layer.split(" | ")} for layer in layers]
    found = [
        next((n for n, line in enumerate(picture) if rooms <= set(re.findall(r"\w+", line))), -1)
        for rooms in names
    ]
    assert -1 not in found, dict(zip(layers, found, strict=True))
    assert found == sorted(found), dict(zip(layers, found, strict=True))
