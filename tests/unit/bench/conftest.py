"""Small rows for the tiny model."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from mlora_worker.data.prepare import IGNORED, TokenRow


@pytest.fixture(scope="session")
def make_rows() -> Callable[[int], list[TokenRow]]:
    """``make_rows(count)``: rows of 6 to 21 tokens, of which the last two thirds are supervised."""

    def make(count: int) -> list[TokenRow]:
        random = np.random.default_rng(5)
        rows = []
        for _ in range(count):
            length = int(random.integers(6, 22))
            ids = random.integers(3, 300, length).astype(np.int32)
            labels = np.full(length, IGNORED, np.int32)
            labels[length // 3 : -1] = ids[length // 3 + 1 :]
            rows.append(TokenRow(ids, labels))
        return rows

    return make
