"""Log lines of a rank, as text or as JSON, and whom they are about.

What is secret is redacted from every line: the keys of the task that it is about, and users, passwords and queries of
web addresses. A record is one line, and the lines of its traceback are indented: no text from outside can look like a
record of its own.

Work on one task in a pool is done inside ``about(task)``: whatever is logged there, by the store's
client too, bears the task's name. Where many tasks are in hand at once, the line itself says which:
``extra=fields_of(task)``.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, TextIO

from mlora_worker.protocol import TaskPlan, indented, one_line, without_credentials, without_keys

FIELDS = ("task", "namespace", "generation")  # of a record about a task

_about: ContextVar[TaskPlan | None] = ContextVar("about", default=None)


def fields_of(task: TaskPlan) -> dict[str, object]:
    """What a record about ``task`` says of it."""
    return {"task": task.name, "namespace": task.namespace, "generation": task.generation}


@contextmanager
def about(task: TaskPlan) -> Iterator[None]:
    """All that this thread logs in the block is about ``task``."""
    former = _about.set(task)
    try:
        yield
    finally:
        _about.reset(former)


class RankJsonFormatter(logging.Formatter):
    """One JSON object a line. ``pipeline``: namespace/name."""

    def __init__(self, rank: int, pipeline: str) -> None:
        super().__init__()
        self._rank, self._pipeline = rank, pipeline

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "pipeline": self._pipeline,
            "rank": self._rank,
            "logger": record.name,
            "message": _shown(record.getMessage()),
        }
        entry |= _whom(record)
        if record.exc_info:
            entry["error"] = _shown(self.formatException(record.exc_info))
        return json.dumps(entry)  # in ASCII: nothing in it ends a line anywhere


class RankTextFormatter(logging.Formatter):
    """Time, rank, level and message."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"%(asctime)s rank {rank} %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        return one_line(_shown(super().formatMessage(record)))

    def formatException(self, ei: Any) -> str:
        return indented(_shown(super().formatException(ei)))


def _shown(text: str) -> str:
    task = _about.get()
    return without_keys(text, task.storage) if task is not None else without_credentials(text)


def _whom(record: logging.LogRecord) -> dict[str, object]:
    task = _about.get()
    known = fields_of(task) if task is not None else {}
    known |= {name: getattr(record, name) for name in FIELDS if hasattr(record, name)}
    return {name: value for name, value in known.items() if value is not None}


def set_up_logging(
    style: Literal["text", "json"], rank: int, pipeline: str, stream: TextIO = sys.stderr
) -> None:
    handler = logging.StreamHandler(stream)
    handler.setFormatter(RankJsonFormatter(rank, pipeline) if style == "json" else RankTextFormatter(rank))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
