"""Bars below a notebook's cell, drawn anew in one place. IPython is there where a notebook runs; nothing imports it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from mlora_operator.cli.run.progress import shown_words
from mlora_operator.cli.task_table import TaskRow, row
from mlora_worker.lines import one_line

_CELLS = 24  # of a bar
_PAUSE = 0.2  # seconds between two drawings of the same states: each is a message to the browser


class Place(Protocol):
    """What IPython's ``display`` returns: an output that can be changed."""

    def update(self, data: Mapping[str, str], *, raw: bool) -> None: ...


Show = Callable[[Mapping[str, str]], Place]  # makes the output


def notebook() -> Show | None:
    """None where no notebook's kernel runs this: in a plain program, or in IPython on a terminal."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if getattr(shell, "kernel", None) is None:
        return None

    def show(data: Mapping[str, str]) -> Place:
        place: Place = ipython.display.display(data, raw=True, display_id=True)
        return place

    return show


class NotebookBars:
    """A bar for each task."""

    def __init__(self, show: Show, clock: Callable[[], float] = time.monotonic) -> None:
        self._show, self._clock = show, clock
        self._rows: dict[tuple[str, str], TaskRow] = {}
        self._place: Place | None = None
        self._drawn: tuple[float, list[str]] | None = None  # when, and the states

    def __enter__(self) -> NotebookBars:
        return self

    def __exit__(self, *_: object) -> None:
        if self._rows:
            self._draw()

    def task_changed(self, task: Mapping[str, Any]) -> None:
        shown = row(task)
        self._rows[shown.namespace, shown.name] = shown
        states = [one.state for one in self._rows.values()]
        if self._drawn is None or self._drawn[1] != states or self._clock() - self._drawn[0] >= _PAUSE:
            self._draw()
            self._drawn = self._clock(), states

    def _draw(self) -> None:
        data = {"text/plain": drawn(list(self._rows.values()))}
        if self._place is None:
            self._place = self._show(data)
        else:
            self._place.update(data, raw=True)


def drawn(rows: list[TaskRow]) -> str:
    """A line for each, in columns."""
    lines = []
    for one in rows:
        state, *figures = shown_words(one)
        lines.append((one_line(one.name), state, _bar(one.step, one.total_steps), *figures))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _bar(step: int, total: int) -> str:
    full = min(_CELLS, _CELLS * step // total) if total else 0
    return "█" * full + "░" * (_CELLS - full)
