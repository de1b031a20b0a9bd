"""How large a part of a spec may be whose fields are not this project's: the pod API's own. Pure.

Everything that walks such a part (the revision of the workers, the StatefulSet, a comparison) takes as long as it is large
and as deep as it is nested, for all pipelines' sake.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

DEEPEST = 24  # lists and mappings within each other; a pod's affinity has 10
MOST_VALUES = 8192
MOST_CHARACTERS = 262_144  # of all keys and texts together, as many as the annotations of an object


def bounded(value: dict[str, Any]) -> dict[str, Any]:
    """``value`` itself. Raises ValueError where it is too large or too deep."""
    characters = 0
    for values, part in enumerate(_parts(value), start=1):
        characters += len(part) if isinstance(part, str) else 0
        if isinstance(part, int) and abs(part) > 2**63:
            raise ValueError("has a number of more than 64 bits")
        if values > MOST_VALUES or characters > MOST_CHARACTERS:
            raise ValueError(
                f"is too large: at most {MOST_VALUES} values and {MOST_CHARACTERS} characters are allowed"
            )
    return value


def _parts(value: object) -> Iterator[object]:
    """All keys and values, without recursion. Raises ValueError where they are nested too deeply."""
    left = [(value, 0)]
    while left:
        one, depth = left.pop()
        if depth > DEEPEST:
            raise ValueError(
                f"is nested too deeply: at most {DEEPEST} levels of lists and mappings are allowed"
            )
        yield one
        if isinstance(one, dict):
            yield from one
            left += [(inner, depth + 1) for inner in one.values()]
        elif isinstance(one, list | tuple):
            left += [(inner, depth + 1) for inner in one]
