"""A public class name means one thing in all houses: who searches for it finds one class."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[3]
HOUSES = ("operator/mlora", "operator/mlora_operator", "worker/mlora_worker")
ALLOWED: dict[str, str] = {}  # name -> why two classes may have it


def classes(house: Path) -> list[tuple[str, str]]:
    """Name and file of each public class."""
    return [
        (node.name, str(path.relative_to(ROOT)))
        for path in sorted(house.rglob("*.py"))
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]


def homonyms(found: list[tuple[str, str]]) -> dict[str, list[str]]:
    files: dict[str, list[str]] = defaultdict(list)
    for name, file in found:
        files[name].append(file)
    return {name: where for name, where in files.items() if len(where) > 1}


def test_homonyms_are_found() -> None:
    assert homonyms([("Lane", "a.py"), ("Pool", "a.py"), ("Lane", "b.py")]) == {"Lane": ["a.py", "b.py"]}


def test_no_two_public_classes_share_a_name() -> None:
    found = [one for house in HOUSES for one in classes(ROOT / house)]
    assert len(found) > 200, "the houses are where this test looks for them"
    shared = homonyms(found)
    assert {name: where for name, where in shared.items() if name not in ALLOWED} == {}
    assert ALLOWED.keys() <= shared.keys(), "a name that is no longer shared leaves the list"
