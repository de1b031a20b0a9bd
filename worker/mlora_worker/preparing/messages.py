"""What a rank and its preparation process say to each other: small JSON in frames, and open files beside it.

Over the control connection: ``Setup`` to the process, ``Ready`` or ``Failed`` back, then one byte and a connection for each
job. Over a job's connection: ``RowJob`` to the process that does it, ``Made`` with the files of its rows or ``Failed``
back;
``Ended`` instead where that process ended without an answer. Keys of tasks are in ``RowJob`` alone.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence
from datetime import date
from typing import Final

from mlora_worker.protocol import Amount, DataCounts, FailureReason, Message, TaskPlan, WorkerConfig

_HEADER: Final = struct.Struct("<Q")
_MOST_FILES: Final = 16  # that travel with one frame
_LARGEST: Final = 2**30  # bytes


class Setup(Message):
    config: WorkerConfig
    folder: str  # of the base model
    max_positions: Amount
    vocabulary: Amount  # rows of its embedding


class Ready(Message):
    uses_date: bool  # whether the tokenizer's chat template does


class RowJob(Message):
    task: TaskPlan
    day: date | None = None


class RowsView(Message):
    """Some rows of a set."""

    set: Amount
    some: bool = False  # not all rows: which, a file of their numbers says (int64)
    digest: str


class LoadFigures(Message):
    """``stream.planner.TaskLoad``."""

    tokens: Amount
    rows: Amount
    spread: float


class Made(Message):
    """``sets``: files of each set of rows, as ``row_files.open_files`` gives them. All of them travel with the frame, then
    those of ``train`` and of ``evaluation`` that say which rows these are."""

    counts: DataCounts
    load: LoadFigures
    sets: tuple[Amount, ...]
    train: RowsView
    evaluation: RowsView | None = None


class Failed(Message):
    """An error: ``errors.py`` makes it and makes an error of it."""

    kind: str
    reason: FailureReason | None = None
    number: int | None = None  # errno
    seconds: float | None = None  # for which a busy store asks to be left alone
    message: str


class Ended(Message):
    """``status`` as of ``subprocess``: negative for a signal. ``peak``: most bytes that it had resident. ``crowded``: it
    was ended because all jobs together had more memory than they may have, and it the most."""

    status: int
    peak: Amount
    crowded: bool = False


class ProcessAnswer(Message):
    """One of these."""

    ready: Ready | None = None
    made: Made | None = None
    failed: Failed | None = None
    ended: Ended | None = None


def send(connection: socket.socket, message: Message, files: Sequence[int] = (), flags: int = 0) -> None:
    """Raises OSError when the other end is gone. ``files`` stay open here."""
    frame = message.model_dump_json(by_alias=True, exclude_none=True).encode()
    header = _HEADER.pack(len(frame))
    if files:
        socket.send_fds(connection, [header], files)
        connection.sendall(frame, flags)
    else:
        connection.sendall(header + frame, flags)


def receive(connection: socket.socket) -> tuple[bytes, list[int]] | None:
    """A frame with its open files, which are the caller's to close; None when the other end is gone."""
    files: list[int] = []
    frame: bytes | None = None
    try:
        frame = _frame(connection, files)
    except ConnectionError:
        pass
    finally:
        if frame is None:
            for file in files:
                os.close(file)
    return (frame, files) if frame is not None else None


def _frame(connection: socket.socket, files: list[int]) -> bytes | None:
    header = b""
    while len(header) < _HEADER.size:
        part, came, _, _ = socket.recv_fds(connection, _HEADER.size - len(header), _MOST_FILES)
        files += came
        if not part:
            return None
        header += part
    (size,) = _HEADER.unpack(header)
    if size > _LARGEST:
        return None
    frame = bytearray()
    while len(frame) < size:
        part = connection.recv(min(2**20, size - len(frame)))
        if not part:
            return None
        frame += part
    return bytes(frame)
