"""A rank's end of its preparation process: jobs go there, rows come back as files that are mapped.

Each job has a connection of its own, and the thread that waits for it holds nothing that a computing thread needs. Closing
the connection is how a job is cancelled, and how all of them end with the rank.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Final

import numpy as np
import numpy.typing as npt

from mlora_worker.data.errors import DataError, Interrupted
from mlora_worker.data.task_rows import TaskRows
from mlora_worker.data.tokenizing.rendering import uses_date
from mlora_worker.data.training_rows.row_files import array_in, rows_in
from mlora_worker.data.training_rows.token_rows import TokenRows
from mlora_worker.preparing import bounds
from mlora_worker.preparing.errors import error_of
from mlora_worker.preparing.handle import ProcessHandle
from mlora_worker.preparing.maker import Cancelled
from mlora_worker.preparing.messages import Ended, Made, ProcessAnswer, RowJob, RowsView, Setup, receive, send
from mlora_worker.protocol import FailureReason, TaskPlan
from mlora_worker.stream.planner import TaskLoad

_PROCESS: Final = "the process that prepares its rows"
_MIB: Final = 2**20


@dataclass(slots=True, eq=False)
class _Running:
    uid: str
    connection: socket.socket
    cancelled: bool = False


class RowProcess:
    """A ``RowMaker``. ``start`` it early; ``set_up`` before rows are made."""

    def __init__(self, handle: ProcessHandle | None = None) -> None:
        self._handle = handle or ProcessHandle()
        self._tells_the_date = False
        self._lock = threading.Lock()  # guards the jobs; never held while anything is waited for
        self._jobs: set[_Running] = set()

    @property
    def pid(self) -> int | None:
        return self._handle.pid

    def start(self) -> RowProcess:
        """As ``ProcessHandle.start``."""
        self._handle.start()
        return self

    def set_up(self, setup: Setup) -> None:
        """As ``ProcessHandle.set_up``."""
        self._tells_the_date = self._handle.set_up(setup).uses_date

    def close(self) -> None:
        self._handle.close()

    def uses_date(self, template: str | None) -> bool:
        return self._tells_the_date if template is None else uses_date(None, template)

    def make(self, task: TaskPlan, day: date | None, wanted: Callable[[], bool]) -> TaskRows:
        """Raises Interrupted also where the job's process was killed or the preparation process ended: a further try may go
        well. A job whose process breaks in another way has broken it, and raises DataError."""
        own, other = socket.socketpair()
        job = _Running(task.uid, own)
        with self._lock:
            self._jobs.add(job)
        try:
            with own:
                with other:
                    if not wanted():
                        raise Cancelled(task.name)
                    self._handle.hand_over(other)
                with contextlib.suppress(ConnectionError):  # what has happened is read
                    send(own, RowJob(task=task, day=day))
                return _rows_of(own)
        except DataError:
            if job.cancelled:
                raise Cancelled(task.name) from None
            raise
        finally:
            with self._lock:
                self._jobs.discard(job)

    def cancel(self, uid: str) -> None:
        with self._lock:
            for job in self._jobs:
                if job.uid == uid:
                    job.cancelled = True
                    with contextlib.suppress(OSError):
                        job.connection.shutdown(socket.SHUT_RDWR)


def _rows_of(connection: socket.socket) -> TaskRows:
    heard = receive(connection)
    if heard is None:
        raise Interrupted(
            FailureReason.INTERNAL_ERROR, "rank 0's preparation process ended while it prepared the rows"
        )
    frame, files = heard
    try:
        answer = ProcessAnswer.model_validate_json(frame)
        if answer.made is not None:
            return _task_rows(answer.made, files)
        if answer.failed is not None:
            raise error_of(answer.failed, _out_of_memory())
        assert answer.ended is not None
        raise _broken(answer.ended)
    finally:
        for file in files:
            os.close(file)


def _task_rows(made: Made, files: Sequence[int]) -> TaskRows:
    """``files`` as ``Made`` says."""
    views = [made.train, *([made.evaluation] if made.evaluation is not None else [])]
    digests = {view.set: view.digest for view in views if not view.some}
    left = iter(files)
    sets = [
        rows_in([next(left) for _ in range(count)], digests.get(at)) for at, count in enumerate(made.sets)
    ]

    def rows(view: RowsView) -> TokenRows:
        whole = sets[view.set]
        return whole.chosen(_numbers(next(left), len(whole)), view.digest) if view.some else whole

    train = rows(made.train)
    evaluation = rows(made.evaluation) if made.evaluation is not None else None
    load = TaskLoad(made.load.tokens, made.load.rows, made.load.spread)
    return TaskRows(train, made.counts, load, evaluation)


def _numbers(file: int, count: int) -> npt.NDArray[np.intp]:
    """Of rows, of which there are ``count``."""
    numbers = array_in(file, "<i8")
    if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < count:
        raise ValueError(f"the selected rows are not among the {count}")
    return numbers


def _broken(ended: Ended) -> DataError:
    held = f"it had {ended.peak // _MIB:,} MiB of memory"
    if ended.crowded:
        return Interrupted(
            FailureReason.OUT_OF_MEMORY,
            f"{_PROCESS} was stopped: all tasks whose rows are prepared at the same time share "
            f"{bounds.most_of_all(bounds.container_limit()) // _MIB:,} MiB of memory, and they exceeded it; {held}, "
            f"the most of all. Shorten its longest rows, or split them",
        )
    if ended.status == -signal.SIGKILL:
        return Interrupted(
            FailureReason.OUT_OF_MEMORY,
            f"{_PROCESS} was killed, most likely because rank 0's machine or container ran out of memory; {held}. "
            f"Give rank 0"
            " more memory, or shorten the longest rows",
        )
    if ended.status == -signal.SIGABRT and ended.peak > _MIB * _most_of_one() // 4:
        return DataError(FailureReason.OUT_OF_MEMORY, _out_of_memory())  # as the tokenizer's library says it
    how = f"exit code {ended.status}"
    if ended.status < 0:
        how = (
            signal.Signals(-ended.status).name
            if -ended.status in {*signal.Signals}
            else f"signal {-ended.status}"
        )
    return DataError(
        FailureReason.INTERNAL_ERROR,
        f"{_PROCESS} broke ({how}); {held}, and its limit is {_most_of_one():,} MiB more than at its start. A "
        f"damaged "
        f"file can "
        "cause this, and so can very long rows: check the data set with `mlora validate --data`, and correct or "
        "shorten its "
        "rows",
    )


def _out_of_memory() -> str:
    return (
        f"preparing its rows needs more than the {_most_of_one():,} MiB of memory that each task may use: "
        f"shorten "
        "the longest rows, or split them"
    )


def _most_of_one() -> int:
    return bounds.most_of_one(bounds.container_limit()) // _MIB
