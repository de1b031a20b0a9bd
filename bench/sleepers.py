"""A pipeline of real processes whose stages sleep instead of computing, so that two cores suffice for eight of them.

Everything but the engine is the worker's own: links, rendezvous, transport over gloo, mailbox, loop, issue rule, recorder.
Ranks are forked from this process, which has imported torch once.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch

from bench.forks import die_with_parent, end_with
from bench.pipeline_sim.fixed_rule import FixedRule
from bench.ranks import HOST, free_ports
from mlora_worker.pipeline import collect
from mlora_worker.pipeline.engine import StageEngine
from mlora_worker.pipeline.frames import Header, Payload
from mlora_worker.pipeline.hello import Membership
from mlora_worker.pipeline.link import Hub, Spoke
from mlora_worker.pipeline.loop import StageLoop
from mlora_worker.pipeline.mailbox import Entry, Mailbox
from mlora_worker.pipeline.results import Backwarded, Forwarded
from mlora_worker.pipeline.trace import HostMarks, SpanRecorder
from mlora_worker.pipeline.transport import Transport, rendezvous
from mlora_worker.stream.grouping import Part
from mlora_worker.stream.items import ITEM, Segment, Stop, Train
from mlora_worker.stream.timeline import Timeline
from mlora_worker.stream.turns import Turns

TOKENS, HIDDEN = 64, 64  # of a microbatch: small messages, so that what is measured is the schedule
_PR_SET_TIMERSLACK = 29


@dataclass(frozen=True, slots=True)
class Shape:
    """What is run: ``rounds`` steps of each of ``groups`` tasks, each step ``microbatches`` microbatches."""

    stages: int
    groups: int
    microbatches: int
    rounds: int
    forward: float  # seconds on each stage
    backward: float


class SleepEngine:
    """In the place of ``StageEngine``: forward and backward take as long as they are told, and give zeros."""

    def __init__(self, index: int, stages: int, forward: float, backward: float) -> None:
        self.stage = SimpleNamespace(index=index, device=torch.device("cpu"))
        self._first, self._last = index == 0, index == stages - 1
        self._forward, self._backward = forward, backward
        self._segments: dict[int, int] = {}  # of each microbatch in flight
        self._zeros = torch.zeros(TOKENS, HIDDEN)

    def settle(self, segment: Segment) -> None:
        """There is no optimizer."""

    def forward(self, item: Train, **_: Any) -> Forwarded:
        sleep_until(time.monotonic() + self._forward)
        self._segments[item.number] = len(item.segments)
        if self._last:
            return Forwarded(losses=torch.zeros(len(item.segments), dtype=torch.float64))
        return Forwarded(hidden=self._zeros)

    def backward(self, number: int, _: torch.Tensor | None) -> Backwarded:
        sleep_until(time.monotonic() + self._backward)
        norms = torch.zeros(self._segments.pop(number), dtype=torch.float64)
        return Backwarded(gradient=None if self._first else self._zeros, squared_norms=norms)


def sleep_until(moment: float) -> None:
    left = moment - time.monotonic()
    if left > 0:
        time.sleep(left)


def run_pipeline(shape: Shape, seconds: float = 120.0) -> Timeline:
    """Run ``shape`` to its end in processes of its own. Raises RuntimeError when a rank fails."""
    reading, writing = os.pipe()
    link, store = free_ports(2)
    ranks = []
    for rank in range(shape.stages):
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            end_with(partial(_rank, shape, rank, link, store, writing))
        ranks.append(pid)
    os.close(writing)
    stopper = threading.Timer(seconds, _kill, (ranks,))
    stopper.start()
    try:
        with os.fdopen(reading, "rb") as pipe:
            content = pipe.read()
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
    finally:
        stopper.cancel()
    if any(codes):
        raise RuntimeError(f"ranks ended with {codes}")
    return Timeline.model_validate_json(content)


def _kill(ranks: list[int]) -> None:
    for pid in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _rank(shape: Shape, rank: int, link: int, store: int, writing: int) -> None:
    die_with_parent()
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1)  # nanoseconds: sleeps end on time
    torch.set_num_threads(1)
    turns = Turns(shape.stages - rank) if rank < shape.stages - 1 else None
    recorder = SpanRecorder(rank, HostMarks())
    engine = SleepEngine(rank, shape.stages, shape.forward, shape.backward)
    if rank == 0:
        _first_rank(shape, engine, recorder, turns, link, store, writing)
        return
    spoke = Spoke.join(HOST, link, _membership(shape), rank)
    mailbox = Mailbox(threading.Condition(), turns=turns)
    transport = _transport(shape, rank, store, spoke.run_id, mailbox)

    def heard(_: int, header: Header, payload: Payload) -> None:
        if header["kind"] == collect.QUESTION:
            spoke.send(*collect.answer(recorder, header, time.monotonic_ns()))
            return
        item = ITEM.validate_python(header)
        if isinstance(item, Train):
            transport.expect_forward(item.number, item.tokens)
            if rank < shape.stages - 1:
                transport.expect_backward(item.number, item.tokens, len(item.segments))
        mailbox.put_item(item, payload)

    spoke.start(heard, mailbox.fail)
    spoke.send({"kind": "ready"})
    _loop(shape, rank, engine, mailbox, transport, recorder, _never).run()


def _first_rank(
    shape: Shape,
    engine: SleepEngine,
    recorder: SpanRecorder,
    turns: Turns | None,
    link: int,
    store: int,
    writing: int,
) -> None:
    hub = Hub.gather(link, _membership(shape), uuid.uuid4().hex, host=HOST)
    changed, ready = threading.Condition(), threading.Semaphore(0)
    rule = FixedRule(shape.stages, 10**9, shape.microbatches)
    steps = {f"task {number}": shape.rounds for number in range(shape.groups)}
    for task in steps:
        rule.join(task, TOKENS * shape.microbatches, shape.microbatches)
    issued: dict[int, Train] = {}
    numbers = iter(range(1, 10**9))

    def supply() -> Entry | None:
        parts = rule.next(lambda _: [TOKENS] * shape.microbatches, lambda task: steps[task] > 0)
        if parts is None:
            return None if any(steps.values()) else Entry(Stop(number=next(numbers)))
        item = Train(number=next(numbers), segments=tuple(map(_segment, parts)))
        issued[item.number] = item
        hub.broadcast(item.model_dump(mode="json", by_alias=True), {})
        transport.expect_backward(item.number, item.tokens, len(item.segments))
        return Entry(item, token_ids=torch.zeros(item.tokens, dtype=torch.int64))

    def returned(number: int, _: torch.Tensor) -> None:
        with changed:
            for task in rule.returned([segment.task for segment in issued.pop(number).segments]):
                steps[task] -= 1

    def heard(rank: int, header: Header, payload: Payload) -> None:
        if header["kind"] == "ready":
            ready.release()
        else:
            collector.heard(rank, header, bytes(payload))

    collector = collect.SpanCollector(recorder, shape.stages, lambda header: hub.broadcast(header, {}))
    mailbox = Mailbox(changed, supply, turns)
    transport = _transport(shape, 0, store, hub.run_id, mailbox)
    hub.start(heard, mailbox.fail)
    for _ in range(shape.stages - 1):
        ready.acquire()
    _loop(shape, 0, engine, mailbox, transport, recorder, returned).run()
    timeline = collector.collect({})
    hub.broadcast(Stop(number=next(numbers)).model_dump(mode="json", by_alias=True), {})
    with os.fdopen(writing, "wb") as pipe:
        pipe.write(timeline.to_json().encode())
    time.sleep(0.2)  # the others read their end before the link breaks


def _membership(shape: Shape) -> Membership:
    return Membership("bench/sleepers", shape.stages, lambda: "token")


def _segment(part: Part) -> Segment:
    return Segment(
        task=part.task, step=1, lengths=part.lengths, first_row=part.first_row, weight=1.0,
        closes_step=part.closes_step,
    )  # fmt: skip


def _transport(shape: Shape, rank: int, store: int, run_id: str, mailbox: Mailbox) -> Transport:
    rendezvous(HOST, store, rank, shape.stages, run_id, "gloo")
    return Transport(
        rank=rank,
        world=shape.stages,
        forward_width=HIDDEN,
        backward_width=HIDDEN,
        dtype=torch.float32,
        device=torch.device("cpu"),
        backend="gloo",
        deliver_forward=mailbox.put_forward,
        deliver_backward=mailbox.put_backward,
        on_error=mailbox.fail,
    )


def _loop(
    shape: Shape,
    rank: int,
    engine: SleepEngine,
    mailbox: Mailbox,
    transport: Transport,
    recorder: SpanRecorder,
    returned: Callable[[int, torch.Tensor], None],
) -> StageLoop:
    return StageLoop(
        first=rank == 0,
        last=rank == shape.stages - 1,
        engine=cast(StageEngine, engine),
        mailbox=mailbox,
        neighbours=transport,
        on_returned=returned,
        on_exported=_never,
        on_fault=_never,
        record=recorder.span,
    )


def _never(*what: Any) -> None:
    raise AssertionError(f"nothing of this kind happens here: {what}")
