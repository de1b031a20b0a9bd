"""A pydantic error as a sentence for the user: each wrong field by its path, in the words of the manifest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from mlora_operator.api.rules import REFUSALS


def describe(error: ValidationError, root: str = "") -> str:
    """All problems in one line, such as ``spec.lora.rank: Input should be greater than 0 (got 0)``.

    ``root`` is put before each path, such as ``spec``. Values are shown only when short and scalar.
    """
    return "; ".join(
        _sentence(problem["loc"], words(problem), problem.get("input"), root) for problem in error.errors()
    )


def words(problem: Mapping[str, Any]) -> str:
    """What is wrong, as the API server says it where that has words of its own."""
    pattern = problem.get("ctx", {}).get("pattern")
    return REFUSALS.get(pattern, problem["msg"]) if isinstance(pattern, str) else str(problem["msg"])


def _sentence(location: tuple[int | str, ...], message: str, value: object, root: str) -> str:
    path = root
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    message = message.removeprefix("Value error, ")
    shown = (
        f" (got {value!r})" if isinstance(value, str | int | float | bool) and len(str(value)) <= 64 else ""
    )
    return f"{path}: {message}{shown}" if path else f"{message}{shown}"
