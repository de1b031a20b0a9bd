"""Pictures, sound and films in rows: bases are trained on text alone, so such a row is refused by what it has. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

# Columns that the text of a row refers to, in whatever format.
MEDIA_COLUMNS: Final = ("images", "videos", "audios")
_KINDS: Final = ("image", "video", "audio")
_WITHOUT: Final = "rows are text alone: remove the row, or what it shows and the text that is about it"


def media_of_content(content: Any) -> str | None:
    """What is wrong with a turn's content that has a part which is no text; None: it has none."""
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and any(one in kind for one in _KINDS):
            return f"has a part of type {kind[:40]}, and {_WITHOUT}"
    return None


def media_of_row(row: Mapping[str, Any]) -> str | None:
    """The same of a row with such a column that is not empty."""
    found = next((name for name in MEDIA_COLUMNS if row.get(name)), None)
    return None if found is None else f"has a column {found!r}, and {_WITHOUT}"
