"""Addresses with stars: what they mean, and that none takes long."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlora_worker.storage.remote.globs import matches
from tests.fixtures.stories import stories

MEANING = {"**/": "(?:[^/]+/)*", "**": ".*", "*": "[^/]*"}


@settings(max_examples=stories(200), deadline=None)
@given(
    pattern=st.lists(st.sampled_from(["*", "**", "**/", "/", "a", "b", "ab", "."]), max_size=6).map("".join),
    address=st.text("ab/.\n", max_size=8),
)
@example("**/**/a", "a/b/a")
@example("**/a", "//a")
@example("***/", "a/b/")
@example("a**/b", "aa/b")
def test_stars_mean_what_these_expressions_mean(pattern: str, address: str) -> None:
    parts = re.findall(r"\*\*/|\*\*|\*|[^*]+", pattern)
    expression = "".join(MEANING.get(part) or re.escape(part) for part in parts)
    assert matches(pattern, address) == (re.fullmatch(expression, address, re.DOTALL) is not None)


@pytest.mark.parametrize(
    ("pattern", "address"),
    [
        ("*a" * 200 + "b", "a" * 900),
        ("**a" * 200 + "b", "a" * 900),
        ("**/" * 200 + "b", "a/" * 450),
        ("**/*a" * 150 + "b", "a/" * 450),
    ],
)
def test_no_pattern_takes_long(pattern: str, address: str) -> None:
    started = time.monotonic()
    assert not matches(pattern, address)
    assert time.monotonic() - started < 1
