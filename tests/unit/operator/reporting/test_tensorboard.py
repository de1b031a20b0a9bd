"""What TensorBoard's own reader finds, whatever is reported how often."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

from mlora_operator.reporting.curves import Finished, Point, ReportError, Run, by_curve
from mlora_operator.reporting.tensorboard import EventFiles


def reader(folder: Path) -> Any:
    return EventAccumulator(str(folder / "team-a" / "support-bot-01234567"), size_guidance={SCALARS: 0})


def curves(loaded: Any) -> dict[str, list[tuple[int, float]]]:
    """As TensorBoard would draw them: doubles would be seen."""
    loaded.Reload()
    return {tag: [(one.step, one.value) for one in loaded.Scalars(tag)] for tag in loaded.Tags()["scalars"]}


def wanted(finished: Finished) -> dict[str, Any]:
    return {
        curve: [(step, pytest.approx(value, rel=1e-6)) for step, value in sorted(values.items())]
        for curve, values in by_curve(finished.points).items()
    }


def test_all_points_are_there_once_however_often_they_are_reported(
    tmp_path: Path, finished: Finished
) -> None:
    assert EventFiles(str(tmp_path), finished.run).complete(finished) == len(finished.points)
    assert curves(reader(tmp_path)) == wanted(finished)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert EventFiles(str(tmp_path), finished.run).complete(finished) == 0
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == before
    assert curves(reader(tmp_path)) == wanted(finished)


def test_a_task_that_was_followed_ends_with_its_whole_history(tmp_path: Path, finished: Finished) -> None:
    watching = reader(tmp_path)  # a TensorBoard that runs all the while
    live = EventFiles(str(tmp_path), finished.run)
    live.add([Point("train/loss", 1, 3.1235)])
    assert curves(watching) == {"train/loss": [(1, pytest.approx(3.1235))]}
    live.add([Point("train/loss", 3, 2.5)])
    assert curves(watching) == {"train/loss": [(1, pytest.approx(3.1235)), (3, 2.5)]}
    assert live.complete(finished) == len(finished.points) - 2
    assert curves(watching) == wanted(finished)
    assert curves(reader(tmp_path)) == wanted(finished)


def test_a_follower_that_was_killed_goes_on_where_it_was(tmp_path: Path, run: Run) -> None:
    EventFiles(str(tmp_path), run).add([Point("train/loss", 1, 4.0), Point("train/loss", 5, 3.0)])
    (file,) = tmp_path.rglob("events*")
    with file.open("ab") as torn:
        torn.write(b"\x20\0\0\0")  # the beginning of a record
    again = EventFiles(str(tmp_path), run)
    again.add([Point("train/loss", 5, 3.0)])
    again.add([Point("train/loss", 4, 9.0)])  # a worker that went back to its checkpoint
    again.add([Point("train/loss", 7, 2.0)])
    assert curves(reader(tmp_path)) == {"train/loss": [(1, 4.0), (5, 3.0), (7, 2.0)]}


def test_a_task_that_was_made_anew_is_another_run(tmp_path: Path, finished: Finished) -> None:
    other = replace(finished, run=replace(finished.run, uid="fedcba98-76"))
    for one in (finished, other):
        assert EventFiles(str(tmp_path), one.run).complete(one) == len(finished.points)
    folders = {path.parent.name for path in tmp_path.rglob("events*")}
    assert folders == {"support-bot-01234567", "support-bot-fedcba98"}


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path, finished: Finished) -> None:
    (tmp_path / "team-a").write_text("a file")
    with pytest.raises(ReportError, match=r"cannot write .*team-a"):
        EventFiles(str(tmp_path), finished.run).complete(finished)
