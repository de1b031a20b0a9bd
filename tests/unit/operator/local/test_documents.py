"""YAML means here what it means to kubectl, which is asked itself (``--local``: without a cluster)."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlora_operator.local.documents import DocumentError, parse

MANIFEST = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\nspec:\n"

SCALAR_LINES = (
    "1e-4 1e+06 1E3 .5 5. 1_000 1_0.5 0x1F 0b11 0o17 017 08 +5 -3 +.5e-3 -017 -0x1f 00 -0 -0.0 1.0 1.5e300 0.0002",
    "12:30 190:20:30 2026-01-01 2001-12-14t21:59:43.10-05:00 y n Yes ON off true False null ~ 0b 0x 1e0x = 1.2.3",
    "\"1e-4\" 'true' 1e22 q_proj s3://a/b . +",
)
SCALARS = [scalar for line in SCALAR_LINES for scalar in line.split()]


def values_of(text: str) -> list[Any]:
    return [document.value for document in parse(text)]


def test_plain_scalars_mean_what_they_mean_to_kubectl() -> None:
    kubectl = shutil.which("kubectl")
    assert kubectl is not None, "kubectl is part of the development environment"
    text = MANIFEST + "".join(f"  k{index}: {scalar}\n" for index, scalar in enumerate(SCALARS))
    command = [kubectl, "annotate", "--local", "-f", "-", "-o", "json", "a=b"]
    answer = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    (ours,) = values_of(text)
    theirs = json.loads(answer.stdout)["spec"]
    assert ours["spec"] == theirs
    # 1 == 1.0 == True in Python: the types count too.
    assert [type(ours["spec"][key]) for key in theirs] == [type(value) for value in theirs.values()]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 0.0001),
        ("1e+06", 1_000_000),
        ('"1e-4"', "1e-4"),
        ("12:30", "12:30"),
        ("2026-01-01", "2026-01-01"),
    ],
)
def test_the_scalars_that_other_loaders_get_wrong(text: str, value: Any) -> None:
    assert values_of(f"a: {text}") == [{"a": value}]


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_number_that_json_writes_is_read_back_equal(number: float) -> None:
    (document,) = parse(json.dumps({"a": number}))
    assert document.value["a"] == number


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.text(st.characters(min_codepoint=32, max_codepoint=126)),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.from_regex(r"\A[a-zA-Z]{1,8}\Z"), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(json_values)
def test_json_is_read_as_json(value: Any) -> None:
    documents = values_of(json.dumps(value))
    assert documents == ([] if value is None else [value])


def test_lines_of_fields_are_known_and_an_absent_field_has_its_parents_line() -> None:
    text = "# comment\na:\n  b: 1\n  c:\n    - x\n    - {d: 2}\n"
    (document,) = parse(text)
    assert document.line == 2
    assert document.line_of(("a", "b")) == 3
    assert document.line_of(("a", "c", 1, "d")) == 6
    assert document.line_of(("a", "c", 7, "z")) == 4
    assert document.line_of(()) == 2


def test_documents_are_separated_and_empty_ones_left_out() -> None:
    documents = list(parse("---\na: 1\n---\n---\n# nothing\n---\nb: 2\n"))
    assert [(one.value, one.line) for one in documents] == [({"a": 1}, 2), ({"b": 2}, 7)]


def test_merge_keys_fill_in_and_own_keys_win() -> None:
    text = "base: &base {rank: 8, alpha: 16}\nlora:\n  <<: *base\n  rank: 4\n"
    (document,) = parse(text)
    assert document.value["lora"] == {"rank": 4, "alpha": 16}
    assert document.line_of(("lora", "rank")) == 4


BAD: dict[str, tuple[str, str, int]] = {
    "a key that is defined twice": ("a: 1\nb:\n  c: 1\n  c: 2\n", "b.c is defined twice", 4),
    "a tab as indentation": ("a:\n\tb: 1\n", "not YAML", 2),
    "an open bracket": ("a: [1, 2\nb: 3\n", "not YAML", 2),
    "infinity": ("a: 1\nb: .inf\n", "not a valid JSON number", 2),
    "not a number": ("a: .NaN\n", "not a valid JSON number", 1),
    "a python object": ("a: !!python/object:os.system {}\n", "is not supported", 1),
    "a custom tag": ("a: !secret x\n", "is not supported", 1),
    "an alias of nothing": ("a: *b\n", "not YAML", 1),
    "an alias of itself": ("a: &a\n  b: *a\n", "contains itself", 1),
    "a list as key": ("? [1, 2]\n: 3\n", "a key must be text", 1),
    "a control character": ("a: \x00\n", "not YAML", 1),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_said_with_its_line(case: str) -> None:
    text, words, line = BAD[case]
    with pytest.raises(DocumentError, match=words) as caught:
        list(parse(text))
    assert caught.value.line == line


def test_aliases_of_aliases_do_not_eat_the_memory() -> None:
    levels = "".join(f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 10)}]\n" for i in range(1, 12))
    with pytest.raises(DocumentError, match="too large"):
        list(parse(f"l0: &l0 [x]\n{levels}"))
