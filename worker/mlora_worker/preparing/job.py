"""One job, in the process that was forked for it: a task's rows, from the source to files that the rank can map."""

from __future__ import annotations

import logging
import os
import socket
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mlora_worker.data.reading.row_bounds import most_text
from mlora_worker.data.row_access import Reading
from mlora_worker.data.task_rows import TaskRows, task_rows
from mlora_worker.data.training_rows.row_files import open_files, open_rows
from mlora_worker.data.training_rows.token_rows import TokenRows
from mlora_worker.preparing import bounds
from mlora_worker.preparing.errors import failed_message
from mlora_worker.preparing.messages import LoadFigures, Made, ProcessAnswer, RowJob, RowsView, receive, send
from mlora_worker.protocol import StorageAccess
from mlora_worker.runtime.log_lines import about
from mlora_worker.storage.object_store.store import Store

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class JobRunner:
    """What all jobs work with."""

    tokenizer: Any
    max_positions: int
    vocabulary: int
    open_store: Callable[[StorageAccess], Store]
    reading: Reading

    def do(self, connection: socket.socket) -> None:
        """Reads a job from ``connection`` and answers there."""
        asked = receive(connection)
        if asked is None:
            return
        job = RowJob.model_validate_json(asked[0])
        with about(job.task):
            try:
                held = _Held()
                made = self._rows(job, held)
            except (Exception, MemoryError) as error:
                failed = failed_message(error)
                if not failed.kind:
                    log.exception("the rows of %s cannot be prepared", job.task.name)
                send(connection, ProcessAnswer(failed=failed))
                return
            answer, files = _packed(made, held, self.reading.cache_folder)
            send(connection, ProcessAnswer(made=answer), files)

    def _rows(self, job: RowJob, held: _Held) -> TaskRows:
        access = job.task.storage
        source = self.reading.source(self.open_store(access), access)
        cache = self.reading.cache(job.task.namespace, opened=held.open)
        return task_rows(
            job.task,
            self.tokenizer,
            source,
            self.max_positions,
            day=job.day,
            cache=cache,
            vocabulary=self.vocabulary,
            most_text=most_text(bounds.most_of_one(bounds.container_limit())),
        )


@dataclass(slots=True)
class _Held:
    """The files of rows stay open, so that these can be given away though others remove their folder."""

    files: dict[int, list[int]] = field(default_factory=dict)  # by ``id`` of the rows, which are here, too
    rows: list[TokenRows] = field(default_factory=list)
    _stack: ExitStack = field(default_factory=ExitStack)

    def open(self, folder: Path, digest: str) -> TokenRows:
        rows = open_rows(folder, digest)
        self.files[id(rows)] = self._stack.enter_context(open_files(folder))
        self.rows.append(rows)
        return rows


def _packed(made: TaskRows, held: _Held, scratch: Path | None) -> tuple[Made, list[int]]:
    sets: list[list[int]] = []
    chosen: list[int] = []

    def view(rows: TokenRows) -> RowsView:
        files = held.files[id(rows.whole)]
        if files not in sets:
            sets.append(files)
        if rows.taken is not None:
            chosen.append(_written(rows.taken, scratch))
        return RowsView(set=sets.index(files), some=rows.taken is not None, digest=rows.digest())

    train = view(made.train)
    evaluation = view(made.evaluation) if made.evaluation is not None else None
    load = LoadFigures(tokens=made.load.tokens, rows=made.load.rows, spread=made.load.spread)
    answer = Made(
        counts=made.counts, load=load, sets=tuple(map(len, sets)), train=train, evaluation=evaluation
    )
    return answer, [*(file for files in sets for file in files), *chosen]


def _written(numbers: npt.NDArray[np.intp], scratch: Path | None) -> int:
    """Into a file without a name."""
    with tempfile.TemporaryFile(dir=scratch) as file:
        file.write(numbers.astype("<i8").tobytes())
        file.flush()
        return os.dup(file.fileno())
