"""docs/operators/pipelines.md knows every label and annotation that the operator reads or writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlora_operator.manifests import names

PAGE = (Path(__file__).parents[4] / "docs" / "operators" / "pipelines.md").read_text()
WORDS = sorted(
    {
        value
        for name, value in vars(names).items()
        if name.isupper() and isinstance(value, str) and "/" in value and not name.startswith("_")
    }
)


def test_there_are_some() -> None:
    assert len(WORDS) > 8


@pytest.mark.parametrize("word", WORDS)
def test_the_page_has_it(word: str) -> None:
    assert f"`{word}" in PAGE
