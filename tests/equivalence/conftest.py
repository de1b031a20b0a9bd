"""Small models, and one thread, since their tensors are tiny."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.equivalence.tasks import Base, Row, random_rows, tiny_llama


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    """A tiny random Llama with grouped key heads and a tied head."""
    return tiny_llama(tmp_path_factory.mktemp("tied"), tied=True)


@pytest.fixture(scope="session")
def untied_base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return tiny_llama(tmp_path_factory.mktemp("untied"), tied=False)


@pytest.fixture(scope="session")
def rows() -> Callable[..., list[Row]]:
    """``rows(count, seed)``: random rows of 6 to 24 tokens."""
    return random_rows
