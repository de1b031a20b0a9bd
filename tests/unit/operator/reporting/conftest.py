"""A run with its losses, and an adapter's folder that has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlora_operator.reporting.curves import Finished, Run, points_of
from tests.fixtures.reported import HISTORY, RUN, write_adapter


@pytest.fixture
def run() -> Run:
    return RUN


@pytest.fixture
def finished() -> Finished:
    return Finished(RUN, points_of(HISTORY), {"r": 8, "lora_alpha": 16, "target_modules": "q_proj, v_proj"})


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "support-bot")
