"""Typer's commands, made once."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import typer.main
import typer.testing


@pytest.fixture(autouse=True, scope="session")
def commands_made_once() -> Iterator[None]:
    """Typer makes those of the whole program again for each call, in 25 ms, and tests call it hundreds of times."""
    made = functools.cache(typer.main.get_command)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", made)
        patch.setattr(typer.testing, "_get_command", made)
        yield
