"""With which number a command ends, and the page that says so."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path

import pytest

from mlora_operator.cli import exit_codes, guarded
from mlora_operator.local.objects import LocalObjects
from mlora_operator.local.timelines import write_timelines
from mlora_worker.stream.timeline import Timeline

PAGE = (Path(__file__).parents[4] / "docs" / "users" / "cli.md").read_text()
CODES = {name: value for name, value in vars(exit_codes).items() if name.isupper()}


def test_the_page_has_every_exit_code_and_no_other() -> None:
    table = PAGE.partition("## Exit codes")[2].partition("\n## ")[0]
    assert sorted(map(int, re.findall(r"^\| (\d+) \|", table, re.MULTILINE))) == sorted(CODES.values())


def test_a_fault_of_the_program_is_not_taken_for_a_task_that_failed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def broken() -> None:
        raise KeyError("gone")

    with pytest.raises(SystemExit) as end:
        guarded(broken)
    assert end.value.code == exit_codes.BROKEN != exit_codes.FAILED
    told = capsys.readouterr().err
    assert "Traceback" in told
    assert "KeyError: 'gone'" in told


def test_an_interrupt_before_a_command_runs_is_no_fault_of_the_program() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as end:
        guarded(interrupted)
    assert end.value.code == exit_codes.INTERRUPTED


def test_an_end_with_a_number_stays_one() -> None:
    def ends() -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit) as end:
        guarded(ends)
    assert end.value.code == exit_codes.TIMEOUT


def test_a_file_that_cannot_be_written_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A full disk is noticed by a write, whose error names no file."""
    state = tmp_path / "loratasks"
    state.mkdir()
    (state / "n.a.tmp").symlink_to("/dev/full")
    objects = LocalObjects(tmp_path, lambda: datetime(2026, 1, 1, tzinfo=UTC))
    task = {"kind": "LoRATask", "metadata": {"namespace": "n", "name": "a"}, "spec": {}}
    with pytest.raises(SystemExit) as end:
        guarded(lambda: objects.apply(task))
    assert end.value.code == exit_codes.INVALID
    told = capsys.readouterr().err
    assert told == f"error: {state / 'n.a.tmp'} cannot be written: No space left on device\n"


def test_a_timeline_that_cannot_be_written_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "out.svg").symlink_to("/dev/full")
    timelines = {"n/p": Timeline(stages=1, spans=(), names={})}
    with pytest.raises(SystemExit):
        guarded(lambda: write_timelines(tmp_path / "out.json", timelines))
    assert f"error: {tmp_path / 'out.svg'} cannot be written" in capsys.readouterr().err
