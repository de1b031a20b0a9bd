"""With which number a command ends, and the page that says so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mlora_operator.cli import exit_codes, guarded

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
