"""The console of all commands: what clusters, workers, stores and files say does not speak to a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from mlora_worker.lines import one_line


class CleanConsole(Console):
    """Shows control characters, escapes and turned text spelt out, whoever prints them: also in tables and bars.

    Lines stay lines. What comes from outside and must not begin a line of its own goes through ``one_line`` before.
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=_clean(segment.text))


def _clean(text: str) -> str:
    return text if text.isascii() and text.isprintable() else "\n".join(map(one_line, text.split("\n")))
