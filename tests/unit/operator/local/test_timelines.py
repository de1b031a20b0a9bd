"""The files that ``mlora run --timeline`` leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.pipeline_sim.simulate import EvenCosts, Workload, simulate
from mlora_operator.local.timelines import installed_renderer, write_timelines

TIMELINE = simulate([Workload("a", [[10]] * 40)], 2, 100, EvenCosts(1e-3, 2e-3))


def test_a_trace_of_everything_and_a_picture_of_a_piece(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    write_timelines(file, {"ns/one": TIMELINE, "ns/two": TIMELINE})
    events = [one for one in json.loads(file.read_text())["traceEvents"] if one["ph"] == "X"]
    assert len(events) == 2 * len(TIMELINE.spans)
    picture = (tmp_path / "out.svg").read_text()
    assert "ns/two: stages idle 50% of the time shown" in picture
    assert picture.count("<title>") < len(TIMELINE.spans) * 2
    assert not (tmp_path / "out.png").exists()


def test_a_renderer_makes_a_png_of_the_same_picture(tmp_path: Path) -> None:
    write_timelines(tmp_path / "out.json", {"p": TIMELINE}, lambda picture: b"PNG of " + picture.encode())
    assert (tmp_path / "out.png").read_bytes() == b"PNG of " + (tmp_path / "out.svg").read_bytes()


def test_the_optional_renderer_makes_a_png(tmp_path: Path) -> None:
    pytest.importorskip("resvg_py")
    write_timelines(tmp_path / "out.json", {"p": TIMELINE}, installed_renderer())
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
