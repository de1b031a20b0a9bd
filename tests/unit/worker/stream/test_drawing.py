"""Timelines as Chrome traces and as pictures: well formed, complete, on the right places, whatever tasks are called."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from bench.pipeline_sim.simulate import EvenCosts, Workload, simulate
from mlora_worker.stream.chrome_trace import chrome_trace
from mlora_worker.stream.drawing import Panel, draw
from mlora_worker.stream.timeline import (
    Span,
    Timeline,
    bubbles,
    excerpt,
    makespan,
    peak_microbatches,
    returns,
    typical,
    window_of_microbatches,
)

SVG = "{http://www.w3.org/2000/svg}"


def span(stage: int, kind: str, number: int, start: int, end: int, *tasks: str) -> Span:
    fields = {"stage": stage, "kind": kind, "number": number, "tasks": tasks, "tokens": 7}
    return Span.model_validate({**fields, "start": start, "end": end})


HAND = Timeline(
    stages=2,
    spans=(
        span(0, "forward", 1, 1_000_000, 2_000_000, "u1", "u2"),
        span(1, "forward", 1, 2_000_000, 3_000_000, "u1", "u2"),
        span(1, "backward", 1, 3_000_000, 5_000_000, "u1", "u2"),
        span(0, "backward", 1, 5_000_000, 7_000_000, "u1", "u2"),
        span(0, "update", 2, 7_000_000, 7_500_000, "u1"),
        span(0, "forward", 2, 7_500_000, 9_000_000, "u3"),
    ),
    names={"u1": "team/<a>", "u2": 'team/"b"&c'},
)


def simulated(steps: int = 5) -> Timeline:
    return simulate([Workload(f"t{i}", [[10]] * steps) for i in range(3)], 3, 100, EvenCosts(1e-3, 2e-3))


def test_a_trace_has_a_complete_event_for_every_span() -> None:
    whole = json.loads(chrome_trace({"ns/one": HAND, "ns/two": simulated()}))
    events = [event for event in whole["traceEvents"] if event["ph"] == "X"]
    assert len(events) == len(HAND.spans) + len(simulated().spans)
    assert {event["pid"] for event in events} == {1, 2}
    for event in events:
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        assert event.keys() >= {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"}
    names = [event["args"]["name"] for event in whole["traceEvents"] if event["ph"] == "M"]
    assert names[:3] == ["pipeline ns/one", "stage 0", "stage 1"]


def test_a_traces_times_are_microseconds_from_the_first_span() -> None:
    events = json.loads(chrome_trace({"p": HAND}))["traceEvents"]
    first = next(event for event in events if event["ph"] == "X")
    assert (first["ts"], first["dur"], first["tid"]) == (0, 1000, 0)
    assert first["args"] == {"microbatch": 1, "tokens": 7, "tasks": ["team/<a>", 'team/"b"&c']}


def boxes(picture: str) -> list[ElementTree.Element]:
    """Of spans: those with a title."""
    root = ElementTree.fromstring(picture)
    return [box for box in root.iter(f"{SVG}rect") if box.find(f"{SVG}title") is not None]


def test_a_picture_is_well_formed_and_has_a_box_for_every_span_on_its_lane() -> None:
    drawn = boxes(draw([Panel("a & b <c>", HAND)]))
    assert len(drawn) == len(HAND.spans)
    lanes = sorted({float(box.attrib["y"]) for box in drawn})
    assert [lanes.index(float(box.attrib["y"])) for box in drawn] == [one.stage for one in HAND.spans]
    starts = [float(box.attrib["x"]) for box in drawn]
    assert starts == sorted(starts)
    title = drawn[0].find(f"{SVG}title")
    assert title is not None
    assert title.text == 'forward 1: team/<a>, team/"b"&c, 7 tokens'


def test_tasks_that_share_microbatches_have_one_colour_and_backwards_another_tone() -> None:
    fills = [box.attrib.get("fill") for box in boxes(draw([Panel("", HAND)]))]
    forward, same, backward, again, update, other = fills
    assert forward == same != backward == again
    assert update is None, "updates have a style of their own"
    assert other not in (forward, backward)


def test_panels_share_one_scale() -> None:
    half = excerpt(HAND, 1_000_000, 5_000_000)
    drawn = boxes(draw([Panel("all", HAND), Panel("half", half)]))
    assert drawn[0].attrib["width"] == drawn[len(HAND.spans)].attrib["width"]


@pytest.mark.parametrize("timeline", [Timeline(stages=0, spans=()), Timeline(stages=2, spans=())])
def test_nothing_can_be_drawn_and_traced(timeline: Timeline) -> None:
    ElementTree.fromstring(draw([Panel("nothing", timeline)]))
    assert "traceEvents" in json.loads(chrome_trace({"p": timeline}))


def test_a_message_crosses_as_json_unchanged() -> None:
    assert Timeline.model_validate_json(HAND.to_json()) == HAND


def test_an_excerpt_is_cut_to_its_time() -> None:
    piece = excerpt(HAND, 1_500_000, 4_000_000)
    assert [(one.stage, one.start, one.end) for one in piece.spans] == [
        (0, 1_500_000, 2_000_000), (1, 2_000_000, 3_000_000), (1, 3_000_000, 4_000_000),
    ]  # fmt: skip


def test_a_typical_piece_holds_the_microbatches_asked_for() -> None:
    timeline = simulated(steps=40)
    piece = typical(timeline, 12)
    back = [one for one in piece.spans if one.kind == "backward" and one.stage == 0]
    assert len(back) == 12
    assert makespan(piece) == 12 * 3_000_000, "a full pipeline gives one back every forward and backward"
    assert typical(HAND, 12) == HAND


def test_measures_of_a_known_timeline() -> None:
    assert makespan(HAND) == 8_000_000
    assert bubbles(HAND) == pytest.approx((3 / 8, 5 / 8))
    assert peak_microbatches(HAND) == (1, 1)
    assert returns(HAND) == (7_000_000,)
    with pytest.raises(ValueError, match="1 microbatches came back, 2 are needed"):
        window_of_microbatches(HAND, 0, 1)
