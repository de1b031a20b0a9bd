"""Patterns mean what they mean in Python's re, and none runs for ever."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlora_worker.stream.patterns import InvalidPattern, compile_pattern, is_name

PATH = "model.layers.13.self_attn.q_proj"


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        (r".*layers\.[0-3]\..*q_proj", False),
        (r".*layers\.(1[0-9]|2)\..*\.(q|v)_proj", True),
        (r"model\.layers\.\d+\.self_attn\.[qv]_proj", True),
        (r".*\.[^v]_proj", True),
        (r".*_proj$|.*", None),
        (r"q_proj|v_proj", False),  # a pattern is the whole path
        (r"(?:model|transformer)\..{3,40}", True),
        (r".{5}", False),
        (r".*\.\w+_proj", True),
        (r".*?q_proj", True),
    ],
)
def test_a_pattern_is_the_whole_path(pattern: str, matches: bool | None) -> None:
    if matches is None:
        with pytest.raises(InvalidPattern, match="is not known; a pattern is always the whole path"):
            compile_pattern(pattern)
        return
    assert compile_pattern(pattern).fullmatch(PATH) is matches
    assert (re.fullmatch(pattern, PATH) is not None) is matches


ATOMS = st.sampled_from(["a", "b", ".", r"\.", "[ab]", "[^a]", r"\d", "1"])


def pieces(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    repeats = st.sampled_from(["", "*", "+", "?", "{2}", "{1,2}", "{0,}", "{3,}"])
    return st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"({pair[0]}|{pair[1]})"),
        st.tuples(inner, repeats).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
    )


@settings(max_examples=300, deadline=None)
@given(pattern=st.recursive(ATOMS, pieces, max_leaves=6), path=st.text("ab.1", max_size=6))
def test_patterns_mean_what_they_mean_in_re(pattern: str, path: str) -> None:
    compiled = compile_pattern(pattern)
    assert compiled.fullmatch(path) == (re.fullmatch(pattern, path) is not None)
    assert compiled.matches_end(path) == (re.match(rf"(.*\.)?({pattern})$", path) is not None)


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("(.*)*x", False),
        ("(a|a)*" * 20 + "x", False),
        ("(.*.*.*)*" * 5 + "x", False),
        ("((.+)+)+x", False),
        ("(" * 83 + "." + ")+" * 83, True),
        ("(" * 60 + ".?" + "){9}" * 60 + "x", False),
        ("(((a{1000}){1000}){1000})", False),
        ("(((a{0,1000}){1000}){1000})", True),
        ("(((a?){1000}){1000,}){1000,}", True),
    ],
)
def test_no_pattern_runs_for_ever(pattern: str, matches: bool) -> None:
    started = time.process_time()
    assert compile_pattern(pattern).fullmatch("a" * 60) is matches
    assert time.process_time() - started < 1


@pytest.mark.parametrize(
    "pattern",
    [
        "*q",
        "(a",
        "a)",
        "[a",
        r"a\1",
        "(?=a)",
        "(?P<n>a)",
        r"\b",
        "a**",
        "a{3,2}",
        "a{9999}",
        "^a",
        "[b-a]",
        "a\\",
    ],
)
def test_what_is_not_known_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidPattern):
        compile_pattern(pattern)


def test_a_name_is_no_pattern() -> None:
    assert is_name("self_attn.q_proj")
    assert is_name("model.layers.3.mlp")
    assert not any(is_name(text) for text in ("q_proj|v_proj", ".*", "q proj", "[qv]_proj", ""))
