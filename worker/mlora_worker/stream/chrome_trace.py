"""Timelines in the trace event format that chrome://tracing and Perfetto read. Pure.

A pipeline is a process, a stage a thread, a span a complete event ("X"); times are microseconds from the first span.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mlora_worker.stream.timeline import Span, Timeline, started

# Names of colours that the viewers know.
_COLOURS = {
    "forward": "thread_state_running",
    "backward": "rail_animation",
    "update": "grey",
    "evaluate": "good",
}


def chrome_trace(timelines: Mapping[str, Timeline]) -> str:
    """JSON of ``timelines``, by the name of the pipeline; all on one clock."""
    zero = min((started(timeline.spans) for timeline in timelines.values() if timeline.spans), default=0)
    events: list[dict[str, Any]] = []
    for process, (name, timeline) in enumerate(timelines.items(), start=1):
        events.append(_named("process_name", process, 0, f"pipeline {name}"))
        for stage in range(timeline.stages):
            events.append(_named("thread_name", process, stage, f"stage {stage}"))
        events += [_event(span, timeline, process, zero) for span in timeline.spans]
    clocks = {name: timeline.clock for name, timeline in timelines.items()}
    whole = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"clocks": json.dumps(clocks)}}
    return json.dumps(whole, separators=(",", ":"))


def _named(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _event(span: Span, timeline: Timeline, process: int, zero: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": f"{span.kind} {span.number}",
        "cat": span.kind,
        "pid": process,
        "tid": span.stage,
        "ts": (span.start - zero) / 1000,
        "dur": span.duration / 1000,
        "cname": _COLOURS[span.kind],
        "args": {
            "microbatch": span.number,
            "tokens": span.tokens,
            "tasks": [timeline.name(task) for task in span.tasks],
        },
    }
