"""docs/users/conditions.md knows every word that a status may hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlora_operator.api import conditions
from mlora_worker.protocol import FailureReason

PAGE = (Path(__file__).parents[4] / "docs" / "users" / "conditions.md").read_text()
WORDS = sorted(
    {value for name, value in vars(conditions).items() if name.isupper()}
    | {one.value for one in FailureReason}
)


@pytest.mark.parametrize("word", WORDS)
def test_the_page_explains_it(word: str) -> None:
    assert f"`{word}`" in PAGE
