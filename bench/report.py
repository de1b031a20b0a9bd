"""What a benchmark prints: a table for people, then one line of JSON."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "peft")
DIGITS = 4  # significant, of every figure in the JSON line


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns as wide as their content; the first one to the left, the others to the right."""
    cells = [list(head), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    lines = []
    for row in cells:
        first, *others = (
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join([first, *others]).rstrip())
    return "\n".join(lines)


def last_line(bench: str, result: Mapping[str, Any], *, repetitions: int, threads: int, quick: bool) -> str:
    """The result as JSON, with what is needed to judge it. Raises ValueError for a figure that is not finite."""
    whole = {
        "bench": bench,
        **result,
        "machine": machine(),
        "versions": versions(),
        "repetitions": repetitions,
        "threads": threads,
        "quick": quick,
    }
    return json.dumps(rounded(whole), allow_nan=False)


def machine() -> str:
    """Processor and cores, such as "AMD EPYC, 2 cores"."""
    model = platform.processor() or platform.machine()
    path = Path("/proc/cpuinfo")
    if path.exists():
        names = [
            line.partition(":")[2].strip() for line in path.read_text().splitlines() if "model name" in line
        ]
        model = names[0] if names else model
    return f"{model}, {len(os.sched_getaffinity(0))} cores"


def versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


def rounded(value: Any) -> Any:
    """Floats to ``DIGITS`` significant digits, however deep they lie."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else value
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return value


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return (
            f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
        )
    return f"{value:,}" if isinstance(value, int) else str(value)
