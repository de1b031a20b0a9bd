"""Columns under their names, as wide as their widest text: never cut, since a pipe has no width. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from rich.text import Text

from mlora_worker.lines import one_line

_GAP = "   "


def aligned(names: Sequence[str], rows: Sequence[Sequence[str]], styles: Sequence[str] = ()) -> list[Text]:
    """A line for the names, and one for each row. ``styles``: of the rows."""
    lines = [[one_line(text) for text in row] for row in (names, *rows)]
    widths = [max(cell_len(line[column]) for line in lines) for column in range(len(names))]
    return [
        Text(
            _GAP.join(
                text + " " * (width - cell_len(text)) for text, width in zip(line, widths, strict=True)
            ).rstrip(),
            style=style,
        )
        for line, style in zip(lines, ("bold", *(styles or [""] * len(rows))), strict=True)
    ]
