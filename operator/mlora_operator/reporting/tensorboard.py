"""A run as event files of TensorBoard, written by TensorBoard's own package; neither TensorFlow nor torch is needed."""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from mlora_operator.reporting.curves import Finished, Point, ReportError, Run, by_curve

_PREFIX = "events.out.tfevents."
_SUFFIX = ".mlora"
_Written = set[tuple[str, int, float]]


class EventFiles:
    """Below ``folder``, in NAMESPACE/NAME-UID; the first eight characters of the uid.

    TensorBoard wants the steps of a curve in order. So ``add`` appends, and ``complete`` writes a new file behind the
    former, unless that has the very same points. A file begins with a session's start at step 0, at which TensorBoard
    forgets what it has read of the run before. The former file stays: one that runs looks for new ones from there.
    """

    def __init__(self, folder: str, run: Run) -> None:
        self._folder = Path(folder) / run.namespace / f"{run.name}-{run.uid[:8]}"
        self._appended: Path | None = None  # the file that ``add`` goes on with, and up to which step it is
        self._last = -1

    def add(self, points: Sequence[Point]) -> None:
        try:
            if self._appended is None:
                known = self._read()
                # A new file: what a killed process has left of a record would hide all that is appended.
                self._appended = self._begin(sorted(known, key=lambda one: one[1]))
                self._last = max((step for _, step, _ in known), default=-1)
            fresh = [(one.curve, one.step, one.value) for one in points if one.step > self._last]
            if fresh:
                with self._appended.open("ab") as file:
                    _write(file, fresh)
                self._last = max(step for _, step, _ in fresh)
        except OSError as error:
            raise self._refused(error) from error

    def complete(self, finished: Finished) -> int:
        curves = by_curve(finished.points)
        points = [
            (curve, step, _single(value))
            for curve, values in curves.items()
            for step, value in values.items()
        ]
        try:
            known = self._read()
            if known != set(points):
                self._begin(sorted(points, key=lambda one: one[1]))
        except OSError as error:
            raise self._refused(error) from error
        self._appended = None
        steps_known = {(curve, step) for curve, step, _ in known}
        return sum((curve, step) not in steps_known for curve, step, _ in points)

    def failed(self) -> None:
        pass

    def place(self) -> str:
        return f"tensorboard --logdir {self._folder.parent.parent}"

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob(f"{_PREFIX}*{_SUFFIX}"))

    def _read(self) -> _Written:
        """Of the last session, up to what a killed process has left unfinished."""
        found: _Written = set()
        for path in self._files():
            for event in LegacyEventFileLoader(str(path)).Load():
                if event.session_log.status == SessionLog.START:
                    found = set()
                found |= {(value.tag, event.step, value.simple_value) for value in event.summary.value}
        return found

    def _begin(self, points: Sequence[tuple[str, int, float]]) -> Path:
        """A new file, the last by name, with ``points``. It appears when it is whole."""
        former = self._files()
        self._folder.mkdir(parents=True, exist_ok=True)
        seconds = max([int(time.time()), *(int(path.name.split(".")[3]) + 1 for path in former)])
        path = self._folder / f"{_PREFIX}{seconds:010d}{_SUFFIX}"
        unfinished = path.with_name(f".unfinished-{seconds}")
        with unfinished.open("wb") as file:
            writer = RecordWriter(file)
            now = time.time()
            writer.write(Event(wall_time=now, file_version="brain.Event:2").SerializeToString())
            start = SessionLog(status=SessionLog.START)
            writer.write(Event(wall_time=now, step=0, session_log=start).SerializeToString())
            _write(file, points)
        unfinished.replace(path)
        return path

    def _refused(self, error: OSError) -> ReportError:
        return ReportError(f"tensorboard: cannot write {self._folder}: {error.strerror or error}")


def _write(file: BinaryIO, points: Sequence[tuple[str, int, float]]) -> None:
    writer = RecordWriter(file)
    for curve, step, value in points:
        summary = Summary(value=[Summary.Value(tag=curve, simple_value=value)])
        writer.write(Event(wall_time=time.time(), step=step, summary=summary).SerializeToString())


def _single(value: float) -> float:
    """As an event file holds it: in single precision."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])
