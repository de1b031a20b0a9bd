"""What a cluster, a worker or a store says does not speak to a reader's terminal, and makes no line of its own."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table
from rich.text import Text

from mlora_operator.cli import app, exit_codes, output
from mlora_operator.cli.fetch.command import main as fetch
from mlora_operator.cli.run.progress import Bars
from mlora_operator.cli.show.aligned import aligned
from mlora_operator.cli.show.columns import TASKS, table
from mlora_operator.cli.show.get_command import _print
from mlora_operator.cli.submit.applying import Submitted
from mlora_operator.cli.submit.awaiting import Waiting
from mlora_operator.cli.submit.conflict import Step
from mlora_operator.cli.submit.journal import Journal
from mlora_operator.cli.submit.outcomes import TaskResult
from mlora_operator.cli.submit.output import SubmitProgress
from mlora_operator.cli.task_table import row
from mlora_operator.cli.watch import Screen
from mlora_operator.local.ending import End, Result
from mlora_operator.reconcile.state.cause import Cause
from mlora_operator.reconcile.state.decision import Event
from mlora_operator.reconcile.state.snapshot import Key
from tests.fixtures.published import publish

FORGED = "other: succeeded, s3://elsewhere"
# Clears the screen, names the window, colours by one character, goes back to the line's begin, turns text around.
EVIL = f"\x1b[2J\x1b]0;owned\x07\x9b31m\r\u202eexe\u2028\n{FORGED}"

TASK: dict[str, Any] = {
    "metadata": {"name": "a", "namespace": "n", "uid": "u"},
    "spec": {"output": {"uri": f"s3://b/{EVIL}"}},
    "status": {
        "state": EVIL,
        "reason": EVIL,
        "loss": EVIL,
        "tokensPerSecond": EVIL,
        "step": 1,
        "adapter": {"uri": EVIL},
        "conditions": [{"type": "Failed", "status": "True", "reason": EVIL, "message": EVIL}],
    },
}


def _submit() -> None:
    telling = SubmitProgress(json=False)
    telling.said(EVIL)
    telling.note(EVIL)
    for entry in Journal(every=0).entries(TASK, 0.0):
        telling.entry(entry)
    telling.failure(TASK, TaskResult.FAILED, [{"reason": EVIL, "message": EVIL}])
    waiting = Waiting([Submitted("n", "a", "u", Step.CREATE, TASK)], 0.0)
    waiting.outcomes[("n", "a")] = TaskResult.SUCCEEDED
    telling.ended(waiting, 0)


def _watch() -> None:
    with Screen() as screen:
        screen.show({"a": row(TASK)})


def _list_and_get() -> None:
    names, rows = table(TASKS, [TASK], datetime.now(UTC), wide=True, everywhere=True)
    for line in aligned(names, rows):
        output.stdout().print(line)
    _print(TASK)


def _run() -> None:
    with Bars() as bars:
        bars.task_changed(TASK)
        bars.happened(Event("LoRATask", Key("n", "a"), "u", "Warning", EVIL, EVIL))
        bars.ended([End("n", "a", one, Cause(EVIL, EVIL)) for one in Result], Path("/x"))


def _error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(**_: object) -> None:
        raise output.CommandError(EVIL, exit_codes.UNREACHABLE)

    monkeypatch.setattr(app, "app", fails)
    with pytest.raises(SystemExit):
        app.main()


def _fetch(folder: Path, **manifest: Any) -> None:
    publish(folder)
    held = json.loads((folder / "manifest.json").read_text()) | {
        "taskUid": "u",
        "namespace": "n",
        "name": "a",
        "baseModel": EVIL,
        "step": 1,
    }
    held |= manifest
    (folder / "manifest.json").write_text(json.dumps(held))
    fetch(
        [
            f"file://{folder}",
            "-d",
            str(folder.with_name("made")),
            *(["--uid", "v"] if "name" in manifest else []),
        ]
    )


def test_a_terminal_hears_nothing_of_what_others_say(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ways: dict[str, Callable[[], None]] = {
        "submit": _submit,
        "watch": _watch,
        "run": _run,
        "list and get": _list_and_get,
        "an error": lambda: _error(monkeypatch),
        "fetch": lambda: _fetch(tmp_path / "good"),
        "fetch of another's": lambda: _fetch(tmp_path / "other", name=EVIL),
        "fetch of a file": lambda: _fetch(
            tmp_path / "corrupt", files=[{"name": EVIL, "bytes": -1, "sha256": EVIL}]
        ),
    }
    for way, speak in ways.items():
        speak()
        shown = "".join(capfd.readouterr())
        assert "owned" in shown, way
        assert _unseen(shown) == set(), way
        assert not any(line.startswith(FORGED) for line in shown.split("\n")), way


def test_a_table_and_words_that_a_command_makes_itself_stay_as_they_are(
    capfd: pytest.CaptureFixture[str],
) -> None:
    table = Table(box=None)
    table.add_column("NAME")
    table.add_row(Text("ä€😀"))
    output.stdout().print(table)
    output.stdout().print("two\nlines")
    assert [line.strip() for line in capfd.readouterr().out.splitlines()] == ["NAME", "ä€😀", "two", "lines"]


def _unseen(shown: str) -> set[str]:
    """Signs that do something and are none: control characters, those that turn text, ends of lines but the usual one."""
    return {one for one in shown if unicodedata.category(one) in ("Cc", "Cf", "Zl", "Zp")} - {"\n"}
