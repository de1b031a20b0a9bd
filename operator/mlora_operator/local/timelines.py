"""What the stages of a local run did when: read from the coordinators at its end, written as a trace and as a picture."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from mlora_operator.coordinator import CoordinatorClient, CoordinatorError, open_session
from mlora_operator.local.writing import writing
from mlora_operator.reconcile.ports import Endpoint
from mlora_operator.reconcile.state.snapshot import Key
from mlora_worker.stream.chrome_trace import chrome_trace
from mlora_worker.stream.drawing import Panel, draw
from mlora_worker.stream.timeline import Timeline, bubble, typical

logger = logging.getLogger(__name__)

_DRAWN = 32  # microbatches of each pipeline that the picture shows; the trace has all
_RENDERER = "resvg_py"  # makes a PNG of an SVG; optional


async def save_timelines(file: Path, endpoints: Mapping[Key, Endpoint]) -> None:
    """Write ``file`` (Chrome trace) and beside it an SVG, and a PNG where the renderer is installed.

    A coordinator that does not answer is left out, with a warning; without any, nothing is written.
    """
    timelines: dict[str, Timeline] = {}
    async with open_session() as session:
        for key, endpoint in endpoints.items():
            try:
                timelines[str(key)] = await CoordinatorClient(session, endpoint).get_timeline()
            except CoordinatorError as error:
                logger.warning("no timeline of %s: %s", key, error)
    if timelines:
        write_timelines(file, timelines, installed_renderer())


def write_timelines(
    file: Path, timelines: Mapping[str, Timeline], render: Callable[[str], bytes] | None = None
) -> None:
    """As ``save_timelines``, of timelines by the name of their pipeline. ``render`` makes a PNG of an SVG."""
    with writing(file):
        file.write_text(chrome_trace(timelines), encoding="utf-8")
    picture = draw([_panel(name, typical(timeline, _DRAWN)) for name, timeline in timelines.items()])
    with writing(file.with_suffix(".svg")) as drawn:
        drawn.write_text(picture, encoding="utf-8")
    if render is not None:
        with writing(file.with_suffix(".png")) as drawn:
            drawn.write_bytes(render(picture))


def installed_renderer() -> Callable[[str], bytes] | None:
    """None where the extra ``png`` is not installed."""
    if importlib.util.find_spec(_RENDERER) is None:
        return None
    renderer = importlib.import_module(_RENDERER)

    def render(picture: str) -> bytes:
        return bytes(
            renderer.svg_to_bytes(svg_string=picture, background="white", sans_serif_family="DejaVu Sans")
        )

    return render


def _panel(name: str, piece: Timeline) -> Panel:
    return Panel(f"{name}: stages idle {bubble(piece):.0%} of the time shown", piece)
