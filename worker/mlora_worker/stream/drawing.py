"""Timelines as an SVG picture: a lane a stage, a colour a group of tasks, forwards light, backwards dark. Pure.

The picture needs no fonts nor scripts of its own and follows the reader's light or dark mode.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from mlora_worker.stream.timeline import Span, Timeline, makespan, started

_LEFT, _RIGHT, _LANE, _GAP = 64, 16, 26, 4  # pixels: margins, a lane's height, between lanes
_TITLE, _AXIS, _LEGEND = 30, 30, 22
_CHARACTER = 6.2  # width of a digit at the size of the numbers
_LABEL = 46  # most characters of a group's name in the legend
# Forward and backward of each group; both readable with black or white text, on light and on dark ground.
_COLOURS = (
    ("#9ecbff", "#1f6feb"), ("#ffd08a", "#b35c00"), ("#a5e3b0", "#1a7f37"), ("#e3b8ff", "#8250df"),
    ("#ffb3ba", "#cf222e"), ("#9be3de", "#0b7a75"), ("#d9c7a3", "#7d5a1a"), ("#c5cdd8", "#57606a"),
)  # fmt: skip
_STYLE = """
text { font: 11px system-ui, sans-serif; fill: #1f2328 }
.title { font-size: 13px; font-weight: 600 }
.dark { fill: #ffffff } .light { fill: #1f2328 } .number { text-anchor: middle }
.lane { fill: #eaeef2 } .tick { stroke: #8c959f } .update { fill: #57606a }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .dark { fill: #ffffff } .light { fill: #1f2328 }
.lane { fill: #2d333b } .update { fill: #adbac7 }
}
"""


@dataclass(frozen=True, slots=True)
class Panel:
    """A timeline with its title."""

    title: str
    timeline: Timeline


def draw(panels: Sequence[Panel], width: int = 1080) -> str:
    """SVG of ``panels``, one below the other on one scale, each from its own first span. ``width`` in pixels."""
    longest = max((makespan(panel.timeline) for panel in panels), default=0)
    scale = (width - _LEFT - _RIGHT) / max(1, longest)  # pixels a nanosecond
    body: list[str] = []
    top = 8
    for panel in panels:
        lines, top = _panel(panel, scale, longest, top)
        body += lines
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top}" width="{width}" height="{top}" '
        f'role="img">\n<style>{_STYLE}</style>\n'
    )
    return head + "\n".join(body) + "\n</svg>\n"


def _panel(panel: Panel, scale: float, longest: int, top: int) -> tuple[list[str], int]:
    """Its elements, and where the next one begins."""
    timeline = panel.timeline
    zero, own = started(timeline.spans), makespan(timeline)
    colours = {task: index for index, group in enumerate(_groups(timeline.spans)) for task in group}
    lines = [f'<text class="title" x="{_LEFT}" y="{top + 16}">{escape(panel.title)}</text>']
    top += _TITLE
    step = _LANE + _GAP
    for stage in range(timeline.stages):
        y = top + stage * step
        lines.append(f'<text x="8" y="{y + 17}">stage {stage}</text>')
        lines.append(_rectangle("lane", _LEFT, y, own * scale))
    for span in timeline.spans:
        x, y = _LEFT + (span.start - zero) * scale, top + span.stage * step
        lines += _span(span, timeline, colours, x, y, span.duration * scale)
    top += timeline.stages * step
    lines += _axis(own, scale, top, _round_step(longest))
    top += _AXIS
    legend, rows = _legend(timeline, colours, top)
    return lines + legend, top + rows * _LEGEND + 12


def _span(
    span: Span, timeline: Timeline, colours: dict[str, int], x: float, y: float, width: float
) -> list[str]:
    names = ", ".join(timeline.name(task) for task in span.tasks)
    title = f"<title>{escape(f'{span.kind} {span.number}: {names}, {span.tokens} tokens')}</title>"
    if span.kind == "update":
        return [_rectangle("update", x, y, width, title)]
    backward = span.kind == "backward"
    colour = _COLOURS[colours[span.tasks[0]] % len(_COLOURS)][backward] if span.tasks else "#8c959f"
    lines = [_rectangle(None, x, y, width, title, colour)]
    text = str(span.number)
    if width >= len(text) * _CHARACTER + 2:
        tone = "dark" if backward else "light"
        lines.append(f'<text class="number {tone}" x="{x + width / 2:.2f}" y="{y + 17}">{text}</text>')
    return lines


def _rectangle(
    style: str | None, x: float, y: float, width: float, inner: str = "", fill: str | None = None
) -> str:
    paint = f'class="{style}"' if style else f'fill="{fill}"'
    # A hair narrower than the time, so that neighbours can be told apart.
    drawn = max(0.2, width - 0.6 if width > 2 else width)
    shape = f'<rect {paint} x="{x:.2f}" y="{y}" width="{drawn:.2f}" height="{_LANE}"'
    return f"{shape}>{inner}</rect>" if inner else f"{shape}/>"


def _axis(end: int, scale: float, top: int, tick: int) -> list[str]:
    """Every ``tick`` from 0 to ``end``."""
    unit, size = ("s", 10**9) if tick >= 10**9 else ("ms", 10**6) if tick >= 10**5 else ("µs", 10**3)
    lines = []
    for moment in range(0, end + 1, tick):
        x = _LEFT + moment * scale
        lines.append(f'<line class="tick" x1="{x:.2f}" y1="{top}" x2="{x:.2f}" y2="{top + 5}"/>')
        lines.append(f'<text class="number" x="{x:.2f}" y="{top + 17}">{moment / size:g}</text>')
    lines.append(f'<text x="8" y="{top + 17}">{unit}</text>')
    return lines


def _round_step(longest: int) -> int:
    """1, 2 or 5 times a power of ten nanoseconds, so that there are about ten ticks."""
    rough = max(1.0, longest / 10)
    power = 10 ** math.floor(math.log10(rough))
    return int(next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough))


def _legend(timeline: Timeline, colours: dict[str, int], top: int) -> tuple[list[str], int]:
    """A pair of swatches for each group, two groups a row; and the number of rows."""
    groups: dict[int, list[str]] = {}
    for task, colour in colours.items():
        groups.setdefault(colour, []).append(timeline.name(task))
    lines = []
    for place, (colour, names) in enumerate(sorted(groups.items())):
        x, y = _LEFT + place % 2 * 500, top + place // 2 * _LEGEND
        light, dark = _COLOURS[colour % len(_COLOURS)]
        lines.append(f'<rect fill="{light}" x="{x}" y="{y}" width="14" height="12"/>')
        lines.append(f'<rect fill="{dark}" x="{x + 16}" y="{y}" width="14" height="12"/>')
        lines.append(f'<text x="{x + 38}" y="{y + 10}">{escape(_shortened(names))}: forward, backward</text>')
    return lines, -(-len(groups) // 2)


def _shortened(names: Sequence[str]) -> str:
    text = ", ".join(names)
    if len(text) <= _LABEL:
        return text
    first = names[0] if len(names[0]) <= _LABEL else names[0][: _LABEL - 1] + "…"
    return first if len(names) == 1 else f"{first} and {len(names) - 1} more"


def _groups(spans: Iterable[Span]) -> list[list[str]]:
    """Tasks that ever share a microbatch, together; in the order in which they appear."""
    groups: list[list[str]] = []
    for span in spans:
        met = [group for group in groups if any(task in group for task in span.tasks)]
        joined = [task for group in met for task in group]
        joined += [task for task in span.tasks if task not in joined]
        if not joined:
            continue
        if len(met) == 1 and len(joined) == len(met[0]):
            continue
        place = groups.index(met[0]) if met else len(groups)
        groups[place:place] = [joined]
        groups = [group for group in groups if not any(group is one for one in met)]
    return groups
