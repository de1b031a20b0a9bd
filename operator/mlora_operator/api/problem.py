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


# Of what a manifest holds, not of the Python that it is read into.
_OF_MANIFESTS: Mapping[str, str] = {
    "tuple_type": "must be a list",
    "dict_type": "must be a mapping",
    "model_type": "must be a mapping",
    "model_attributes_type": "must be a mapping",
    "string_type": "must be text; put it in quotes",
    "extra_forbidden": "unknown field",
    "missing": "is missing",
    "too_short": "must have at least {min_length} of them",
    "too_long": "must have at most {max_length} of them",
}


def words(problem: Mapping[str, Any]) -> str:
    """What is wrong, as the API server says it where that has words of its own."""
    context = problem.get("ctx", {})
    pattern = context.get("pattern")
    told = REFUSALS.get(pattern) if isinstance(pattern, str) else _OF_MANIFESTS.get(problem["type"])
    return told.format(**context) if told is not None else str(problem["msg"])


def _sentence(location: tuple[int | str, ...], message: str, value: object, root: str) -> str:
    path = root
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    message = message.removeprefix("Value error, ")
    shown = (
        f" (got {value!r})" if isinstance(value, str | int | float | bool) and len(str(value)) <= 64 else ""
    )
    return f"{path}: {message}{shown}" if path else f"{message}{shown}"
