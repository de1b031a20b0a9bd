"""Patterns mean what they mean in Python's re, and none takes long."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlora_worker.stream.patterns import LARGEST, Automaton, InvalidPattern, compile_pattern, is_name
from tests.fixtures.stories import stories

PATH = "model.layers.13.self_attn.q_proj"


def fullmatch(pattern: str, path: str) -> bool:
    return bool(Automaton([compile_pattern(pattern)]).matches(path))


def matches_end(pattern: str, path: str) -> bool:
    return bool(Automaton([compile_pattern(pattern)], anywhere=True).matches(path))


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        (r".*layers\.[0-3]\..*q_proj", False),
        (r".*layers\.(1[0-9]|2)\..*\.(q|v)_proj", True),
        (r"model\.layers\.\d+\.self_attn\.[qv]_proj", True),
        (r".*\.[^v]_proj", True),
        (r"^.*_proj$", True),
        (r"\Amodel.*\bq_proj\Z", True),
        (r"q_proj|v_proj", False),  # a pattern is the whole path
        (r"(?:model|transformer)\..{3,40}", True),
        (r"(?P<place>.*)\.q_proj", True),
        (r"model.{,8}13.*", True),
        (r".{5}", False),
        (r".*\.\w+_proj", True),
        (r".*?q_proj", True),
    ],
)
def test_a_pattern_is_the_whole_path(pattern: str, matches: bool) -> None:
    assert fullmatch(pattern, PATH) is matches
    assert (re.fullmatch(pattern, PATH) is not None) is matches


SINGLE = (*"abq.[]^-{}()|?*+,$1", r"\d", r"\w", r"\.", r"\Z", r"\A", r"\b", r"\B", r"\_", r"\x61")
LONGER = ("[^", "(?:", "(?P<n>", "{,2}", "{2}", "{1,}", "{,}", "[a-b]", r"[\w-]", "x{2}")
TOKENS = st.sampled_from((*SINGLE, *LONGER))
PATHS = st.lists(st.text("ab.q1_-", min_size=1, max_size=6), min_size=3, max_size=6)


def known(text: str) -> bool:
    try:
        compile_pattern(text)
    except InvalidPattern:
        return False
    return True


@settings(max_examples=stories(300), deadline=None)
@given(pattern=st.lists(TOKENS, max_size=9).map("".join).filter(known), paths=PATHS)
def test_patterns_mean_what_they_mean_in_re(pattern: str, paths: list[str]) -> None:
    for path in paths:
        assert fullmatch(pattern, path) == (re.fullmatch(pattern, path) is not None)
        assert matches_end(pattern, path) == (re.match(rf"(.*\.)?({pattern})$", path) is not None)


def test_patterns_that_are_looked_for_together_do_not_hide_each_other() -> None:
    patterns = [compile_pattern(text) for text in (r".*_proj", r".*v_proj", r"model\..*", "a|b", ".*")]
    assert sorted(Automaton(patterns).matches(PATH)) == [0, 2, 4]


@pytest.mark.parametrize(
    "pattern",
    [
        "(.*)*x",
        "(a|a)*" * 20 + "x",
        "(.*)*" * 48 + ".{0,10}",
        "((.+)+)+x",
        "(" * 83 + "." + ")+" * 83,
        "[" + "ab" * 126 + "]",
    ],
)
def test_a_pattern_is_as_large_as_its_text_however_its_repeats_are_nested(pattern: str) -> None:
    """What it costs is its size times the length of the path."""
    assert compile_pattern(pattern).size <= 40 + 2 * len(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        ".{0,999}" * 30,
        ".{999}" * 42,
        "((.{0,30}){0,30}a){0,1}" * 5,
        "(" * 60 + ".?" + "){9}" * 60,
        "(((a{1000}){1000}){1000})",
        "(((a?){1000}){1000,}){1000,}",
    ],
)
def test_a_pattern_that_would_be_large_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidPattern, match=f"more than {LARGEST} instructions|is not a valid repeat count"):
        compile_pattern(pattern)


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        ("*q", r"\* has nothing to repeat"),
        ("(a", r"a \( has no \)"),
        ("a)", r"a \) has no \("),
        ("[a", r"a \[ has no \]"),
        ("a**", r"\*\* repeats a repeat"),
        ("a{3,2}", r"\{3,2\} is not a valid repeat count"),
        ("a{9999}", r"\{9999\} is not a valid repeat count"),
        ("[b-a]", "b-a is not a valid range"),
        ("a\\", "in the middle of an escape"),
        (r"(a)\1", "refers to a group"),
        ("(?P<n>a)(?P=n)", "refers to a group"),
        ("(?=a)a", "looks ahead"),
        ("(?!a)b", "looks ahead"),
        ("(?<=a)b", "looks behind"),
        ("(?<!a)b", "looks behind"),
        ("(a)?(?(1)b|c)", "has a condition"),
        ("(?>a)", "has an atomic group"),
        ("a(?#b)", "has a comment"),
        ("(?i)a", "sets flags"),
        ("a++", "repeats a repeat"),
        (r"\p{L}", r"\\p is not supported"),
        (r"\Qa\E", r"\\Q is not supported"),
        ("[[:alpha:]]", "has two meanings"),
        ("[a&&b]", "has two meanings"),
        (r"\b*a", "which PEFT uses"),
        (r"[\w-z]", "not a valid range|which PEFT uses"),
        ("\u00e9", "module paths are ASCII"),
        ("\ud800", "module paths are ASCII"),
    ],
)
def test_what_is_not_known_is_refused_by_its_name(pattern: str, told: str) -> None:
    with pytest.raises(InvalidPattern, match=told):
        compile_pattern(pattern)


def test_a_name_is_no_pattern() -> None:
    assert is_name("self_attn.q_proj")
    assert is_name("model.layers.3.mlp")
    assert not any(is_name(text) for text in ("q_proj|v_proj", ".*", "q proj", "[qv]_proj", ""))
