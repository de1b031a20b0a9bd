"""What tests of data share: tiny tokenizers that are real."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.fixtures.tiny_tokenizer import tiny_tokenizer


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., Any]:
    return tiny_tokenizer
