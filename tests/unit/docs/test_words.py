"""What users read is in plain English: turns that the project has used before, and that readers stumble over, stay out."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PRODUCT = [
    path
    for folder in ("operator/mlora", "operator/mlora_operator", "worker/mlora_worker")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
READ_WHOLE = [
    *(ROOT / "crds").glob("*.yaml"),
    ROOT / "charts/mlora-operator/values.yaml",
    ROOT / "charts/mlora-operator/templates/NOTES.txt",
    ROOT / "charts/mlora-operator/files/alerts.yaml",
    ROOT / "operator/mlora_operator/page/files/index.html",
]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted(page for page in (ROOT / "docs").rglob("*.md") if page.name != "glossary.md"),  # it lists them
]

# A pattern of a turn, and what to write instead.
TURNS = {
    r"anew": "again, from the start, restart",
    r"lies? (?:at|in|there|below|under|on|beside)": "is at, exists",
    r"(?<!there )(?:is|are|was|were) no (?!longer\b|more than\b|less than\b)[a-z]+": "is not a",
    r"(?:for|after|within) so long": "for this long",
    r"so many (?:seconds|tasks|tokens|steps)": "this many",
    r"told": "reported, sent",
    r"(?:go|goes|went|gone|going) on": "continue, resume",
    r"nobody": "no task, no user",
    r"whoever": "a user who",
    r"blotted": "redacted",
    r"in the midst": "during",
    r"go(?:es)? first": "is scheduled first, is ahead in the queue",
    r"look(?:s|ed)? after": "watch",
    r"stands? apart": "is isolated, cannot be reconciled",
    r"for want of": "for lack of, because it ran out of",
    r"passed over": "skipped, ignored",
    r"any ?more": "no longer",
    r"in vain": "without effect",
    r"turned away": "rejected",
    r"given back": "released",
    r"(?:gives?|gets?|got|has|had|no|its|a) place": "is admitted, memory",
    r"taken up": "resumed",
    r"shall": "must, will",
    r"(?:tried|started|begun) again": "retried, restarted",
    r"beg[ai]ns? anew": "starts from the beginning",
    r"let in": "admitted",
    r"of (?:no )?use": "useful, invalid",
    r"learnt": "trained on, learned",
    r"out of sight": "unreachable",
    r"by and by": "gradually",
}
_TURN = re.compile(rf"\b(?:{'|'.join(TURNS)})\b", re.IGNORECASE)

# Pages that still have some, at most so many. Numbers here only fall: a page that has none leaves the list.
LEFT: dict[str, int] = {
    "docs/contributors/checkpoints.md": 3,
    "docs/contributors/decisions/2026-11-27-gradients-travel-as-plain-sums.md": 2,
    "docs/contributors/decisions/2026-11-27-keys-go-through-the-plan.md": 5,
    "docs/contributors/decisions/2026-11-27-links-are-the-group.md": 5,
    "docs/contributors/decisions/2026-11-27-one-loop-over-indexes.md": 1,
    "docs/contributors/decisions/2026-11-27-update-rides-with-the-next-item.md": 2,
    "docs/contributors/decisions/2026-11-28-a-fault-repeats-the-step.md": 1,
    "docs/contributors/decisions/2026-11-28-a-full-stage-waits-a-moment.md": 1,
    "docs/contributors/decisions/2026-11-29-a-link-begins-with-a-proof.md": 7,
    "docs/contributors/decisions/2026-11-29-one-certificate-for-each-pipeline.md": 5,
    "docs/contributors/decisions/index.md": 1,
    "docs/contributors/isolation.md": 5,
    "docs/contributors/numerics.md": 1,
}


def said(path: Path) -> Iterator[tuple[int, str]]:
    """Texts of a module that somebody may read, with their lines: not docstrings, nor single words."""
    tree = ast.parse(path.read_text())
    not_said: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):  # docstrings, and texts that stand alone
            not_said.add(id(node.value))
        if isinstance(node, ast.JoinedStr):
            not_said.update(id(part) for part in node.values)
            text = "".join(part.value if isinstance(part, ast.Constant) else "_" for part in node.values)  # type: ignore[misc]
            yield node.lineno, text
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in not_said:
            yield node.lineno, node.value


def found(text: str) -> list[str]:
    return [match[0] for match in _TURN.finditer(text)]


@pytest.mark.parametrize(
    ("text", "turns"),
    [
        ("the workers are started anew", ["anew"]),
        ("the file is no manifest", ["is no manifest"]),
        ("the file is no longer there", []),
        ("it goes on from its checkpoint", ["goes on"]),
        ("the task released its pipeline memory", []),
    ],
)
def test_turns_are_found(text: str, turns: list[str]) -> None:
    assert found(text) == turns


def test_no_message_has_such_a_turn() -> None:
    stumbles = [
        f"{path.relative_to(ROOT)}:{line}: {turn!r} in {text[:80]!r}"
        for path in PRODUCT
        for line, text in said(path)
        if " " in text
        for turn in found(text)
    ]
    assert stumbles == []


@pytest.mark.parametrize("path", READ_WHOLE, ids=lambda path: path.name)
def test_no_text_for_users_has_such_a_turn(path: Path) -> None:
    assert found(path.read_text()) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_gets_no_further_such_turn(page: Path) -> None:
    turns = found(page.read_text())
    assert len(turns) <= LEFT.get(str(page.relative_to(ROOT)), 0), turns


def test_the_list_of_pages_names_pages() -> None:
    assert set(LEFT) <= {str(page.relative_to(ROOT)) for page in PAGES}
