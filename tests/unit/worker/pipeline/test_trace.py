"""Spans of a rank are recorded cheaply, also where the device lags behind; rank 0 puts those of all ranks on its clock."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from bench.pipeline_sim.simulate import EvenCosts, Workload, simulate
from mlora_worker.pipeline.collect import ANSWER, SPANS, SpanCollector, Unanswered, answer, answering, boot_id
from mlora_worker.pipeline.frames import Header
from mlora_worker.pipeline.trace import HostMarks, SpanRecorder
from mlora_worker.stream.timeline import Span, latest


def recorder(stage: int = 0, capacity: int = 10) -> SpanRecorder:
    """Each look at its clock is 1 ns later."""
    return SpanRecorder(stage, HostMarks(itertools.count(100).__next__), capacity)


def span(stage: int, start: int, end: int) -> Span:
    return Span(stage=stage, kind="forward", number=1, tasks=("a",), tokens=5, start=start, end=end)


def test_a_block_is_a_span_also_when_it_fails() -> None:
    spans = recorder()
    with spans.span("forward", 1, ("a", "b"), 7):
        pass
    with pytest.raises(ZeroDivisionError), spans.span("backward", 1, ("a", "b"), 7):
        raise ZeroDivisionError
    first, second = spans.spans()
    assert (first.kind, first.tasks, first.tokens, first.start, first.end) == (
        "forward",
        ("a", "b"),
        7,
        100,
        101,
    )
    assert (second.kind, second.start, second.end) == ("backward", 102, 103)


def test_only_the_last_spans_are_kept() -> None:
    spans = recorder(capacity=3)
    for number in range(5):
        with spans.span("forward", number, (), 1):
            pass
    assert [one.number for one in spans.spans()] == [2, 3, 4]
    with spans.span("forward", 5, (), 1):
        pass
    assert [one.number for one in spans.spans()] == [3, 4, 5]


class LateMarks:
    """A device that has come to ``now``."""

    clock = "device"

    def __init__(self) -> None:
        self.made, self.now, self.read = 0, 0, 0

    def mark(self) -> int:
        self.made += 10
        return self.made

    def passed(self, mark: int) -> bool:
        return mark <= self.now

    def nanoseconds(self, mark: Any) -> int:
        assert self.read < mark <= self.now, "asked in order, and not too early"
        self.read = mark
        return self.read


def test_what_the_device_has_not_done_is_handed_out_later() -> None:
    marks = LateMarks()
    spans = SpanRecorder(0, marks)
    for number in (1, 2):
        with spans.span("forward", number, (), 1):
            pass
    assert spans.spans() == ()
    marks.now = 35
    assert [(one.start, one.end) for one in spans.spans()] == [(10, 20)]
    marks.now = 40
    assert [(one.start, one.end) for one in spans.spans()] == [(10, 20), (30, 40)]


def collector(reply: Mapping[int, tuple[Header, bytes]], clock: int = 1000) -> SpanCollector:
    """Of a rank 0 with two others, each of which answers what ``reply`` says."""
    asked: list[Header] = []

    def ask(question: Header) -> None:
        asked.append(question)
        for rank, (header, payload) in reply.items():
            head = {"asked": question["asked"], **header}
            threading.Thread(target=made.heard, args=(rank, head, payload)).start()

    made = SpanCollector(recorder(), 3, ask, lambda: clock)
    return made


def test_spans_of_all_ranks_come_together_with_names() -> None:
    others = {rank: recorder(rank) for rank in (1, 2)}
    for one in others.values():
        with one.span("forward", 1, ("uid-a",), 4):
            pass
    reply = {rank: answer(one, {"asked": 1000}, 2000) for rank, one in others.items()}
    timeline = collector(reply).collect({"uid-a": "team/a", "uid-b": "team/b"})
    assert [one.stage for one in timeline.spans] == [1, 2]
    assert (timeline.stages, timeline.names, timeline.clock) == (3, {"uid-a": "team/a"}, "host")


STREAM = simulate([Workload("a", [[10]] * 30), Workload("b", [[10]] * 30)], 3, 100, EvenCosts(1e-3, 2e-3))


@pytest.mark.parametrize("newest", [1, 4, 20, 10_000])
def test_of_the_newest_microbatches_the_others_send_no_more_than_a_picture_needs(newest: int) -> None:
    recorders = [recorded(stage) for stage in range(STREAM.stages)]
    sent: list[tuple[Span, ...]] = []

    def ask(question: Header) -> None:
        for rank, one in enumerate(recorders[1:], 1):
            header, payload = answer(one, question, 0)
            sent.append(SPANS.validate_json(payload))
            threading.Thread(target=made.heard, args=(rank, header, payload)).start()

    made = SpanCollector(recorders[0], STREAM.stages, ask)
    found = latest(made.collect({}, newest), newest)
    assert sorted(found.spans, key=repr) == sorted(latest(STREAM, newest).spans, key=repr)
    in_flight = 2 * STREAM.stages
    assert all(len(spans) <= 3 * (newest + in_flight) for spans in sent)


def recorded(stage: int) -> SpanRecorder:
    """What a rank has recorded of ``STREAM``."""
    spans = [one for one in STREAM.spans if one.stage == stage]
    moments = iter([moment for one in spans for moment in (one.start, one.end)])
    made = SpanRecorder(stage, HostMarks(moments.__next__))
    for one in spans:
        with made.span(one.kind, one.number, one.tasks, one.tokens):
            pass
    return made


def test_the_clock_of_another_machine_is_moved_to_that_of_rank_0() -> None:
    here = ({"kind": ANSWER, "now": 5, "boot": boot_id()}, SPANS.dump_json((span(1, 10, 20),), by_alias=True))
    there = ({"kind": ANSWER, "now": 51_000, "boot": "other"}, SPANS.dump_json((span(2, 50_010, 50_020),)))
    timeline = collector({1: here, 2: there}).collect({})
    assert [(one.start, one.end) for one in timeline.spans] == [(10, 20), (10, 20)]


def test_a_rank_that_does_not_answer_is_named_and_a_late_answer_is_ignored() -> None:
    one = recorder(1)
    late = {1: answer(one, {"asked": 1000}, 2000), 2: ({"asked": 999, "now": 0, "boot": boot_id()}, b"[]")}
    with pytest.raises(Unanswered, match=r"\[2\]"):
        collector(late).collect({}, patience=0.1)


def test_who_reads_a_link_does_not_wait_until_it_may_answer() -> None:
    """Else rank 0, which sends with the lock that its readers need, and this rank could wait for each other."""
    may_send, sent = threading.Event(), list[Header]()

    def send(header: Header, _: bytes) -> None:
        assert may_send.wait(5)
        sent.append(header)

    with ThreadPoolExecutor(1) as threads:
        answering(recorder(), send, threads)({"asked": 7})
        heard = time.monotonic_ns()
        assert sent == []
        may_send.set()
    [header] = sent
    assert (header["kind"], header["asked"]) == (ANSWER, 7)
    assert header["now"] <= heard, "clocks are compared by when the question came"
