"""Spans of all ranks on one clock: rank 0 asks over the links, the others answer. Nothing is sent unless somebody asks."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from pathlib import Path

from pydantic import TypeAdapter

from mlora_worker.pipeline.frames import Header
from mlora_worker.pipeline.trace import SpanRecorder
from mlora_worker.stream.timeline import Span, Timeline

SPANS: TypeAdapter[tuple[Span, ...]] = TypeAdapter(tuple[Span, ...])
QUESTION = "spans?"  # kind of the header from rank 0 to the others
ANSWER = "spans"


def answer(recorder: SpanRecorder, question: Header, now: int) -> tuple[Header, bytes]:
    """What a rank answers: its spans, and what its clock said when it heard the question."""
    header = {"kind": ANSWER, "asked": question["asked"], "now": now, "boot": boot_id()}
    return header, SPANS.dump_json(recorder.spans(question.get("first", 0)), by_alias=True)


def answering(
    recorder: SpanRecorder, send: Callable[[Header, bytes], None], threads: Executor
) -> Callable[[Header], None]:
    """Answers a question from ``threads``, and returns at once: who reads a link must not wait until it may send. Rank 0
    may be sending a task's state and read nothing meanwhile, until this rank has read it.
    """

    def asked(question: Header) -> None:
        now = time.monotonic_ns()
        threads.submit(lambda: send(*answer(recorder, question, now)))

    return asked


class Unanswered(TimeoutError):
    """Some ranks did not send their spans in time."""


class SpanCollector:
    """Rank 0: the spans of all ranks on its own clock. ``ask`` sends a header to every other rank."""

    def __init__(
        self,
        own: SpanRecorder,
        stages: int,
        ask: Callable[[Header], None],
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._own, self._stages, self._ask, self._clock = own, stages, ask, clock
        self._one_at_a_time = threading.Lock()
        self._changed = threading.Condition()
        self._asked = 0  # when, on the own clock: it also tells late answers to a former question
        self._answers: dict[int, tuple[Span, ...]] = {}

    def heard(self, rank: int, header: Header, payload: bytes) -> None:
        """An answer; called by its link's thread."""
        offset = 0 if header["boot"] == boot_id() else int(header["now"]) - int(header["asked"])
        spans = SPANS.validate_json(payload)
        with self._changed:
            if header["asked"] == self._asked:
                self._answers[rank] = tuple(_moved(span, -offset) for span in spans) if offset else spans
                self._changed.notify_all()

    def collect(self, names: Mapping[str, str], newest: int = 0, patience: float = 10.0) -> Timeline:
        """The spans of all stages, of about the ``newest`` microbatches (0: of all that are known): to send, read and check
        thousands of spans takes a good part of a second, in which this rank computes nothing. Blocks. Raises
        ``Unanswered`` after ``patience`` seconds."""
        with self._one_at_a_time:
            first = self._own.first_of(newest) if newest else 0
            with self._changed:
                self._asked, self._answers = self._clock(), {}
            if self._stages > 1:
                self._ask({"kind": QUESTION, "asked": self._asked, "first": first})
            with self._changed:
                if not self._changed.wait_for(lambda: len(self._answers) == self._stages - 1, patience):
                    missing = sorted(set(range(1, self._stages)) - self._answers.keys())
                    raise Unanswered(f"stages {missing} did not send their spans within {patience:g} s")
                spans = [
                    *self._own.spans(first),
                    *(span for rank in sorted(self._answers) for span in self._answers[rank]),
                ]
        tasks = {task for span in spans for task in span.tasks}
        return Timeline(
            stages=self._stages,
            spans=tuple(spans),
            names={uid: name for uid, name in names.items() if uid in tasks},
            clock=self._own.clock,
        )


def boot_id() -> str:
    """Equal on machines that share a CLOCK_MONOTONIC: the same kernel, since the same start."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _moved(span: Span, by: int) -> Span:
    return span.model_copy(update={"start": span.start + by, "end": span.end + by})
