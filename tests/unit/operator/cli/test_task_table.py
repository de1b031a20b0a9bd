"""What is shown of a task, and when watching is over."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from mlora_operator.cli import exit_codes
from mlora_operator.cli.output import CommandError
from mlora_operator.cli.task_table import TaskRow, as_json, row
from mlora_operator.cli.watch import JsonRows, outcome, table, watch


def task(name: str = "a", **status: Any) -> dict[str, Any]:
    content: dict[str, Any] = {"metadata": {"namespace": "default", "name": name}, "spec": {"priority": 3}}
    return content | ({"status": status} if status else {})


def condition(type_: str, status: str = "True", reason: str = "R", message: str = "m") -> dict[str, str]:
    return {"type": type_, "status": status, "reason": reason, "message": message}


TRAINING = task(
    state="Training", reason="Training", step=5, totalSteps=12, loss="1.2345", tokensPerSecond="812"
)
SUCCEEDED = task(
    state="Succeeded", conditions=[condition("Succeeded")], adapter={"uri": "s3://x"}, step=12, totalSteps=12
)
FAILED = task(
    "b",
    state="Failed",
    reason="InvalidRow",
    conditions=[
        condition("Succeeded", "False"),
        condition("Failed", reason="InvalidRow", message="line 7 has no answer"),
    ],
)


def test_a_task_that_nobody_has_looked_at_is_pending() -> None:
    shown = row(task())
    assert (shown.state, shown.priority, shown.finished) == ("Pending", 3, False)


def test_a_failed_task_says_why() -> None:
    shown = row(FAILED)
    assert (shown.failed, shown.reason, shown.message) == (True, "InvalidRow", "line 7 has no answer")


def test_json_has_the_names_of_the_api() -> None:
    said = json.loads(json.dumps(as_json(row(TRAINING))))
    assert (said["step"], said["totalSteps"], said["tokensPerSecond"], said["loss"]) == (
        5,
        12,
        "812",
        "1.2345",
    )


OUTCOMES: dict[str, tuple[list[dict[str, Any]], set[str], int | None]] = {
    "one still trains": ([TRAINING, FAILED], set(), None),
    "all succeeded": ([SUCCEEDED], set(), exit_codes.OK),
    "one failed": ([SUCCEEDED, FAILED], set(), exit_codes.FAILED),
    "the wanted one succeeded": ([SUCCEEDED, FAILED], {"a"}, exit_codes.OK),
    "the wanted one is not there yet": ([SUCCEEDED], {"a", "c"}, None),
    "there is none": ([], set(), None),
}


@pytest.mark.parametrize("case", OUTCOMES)
def test_watching_ends_when_all_wanted_tasks_have_finished(case: str) -> None:
    tasks, wanted, code = OUTCOMES[case]
    assert outcome([row(one) for one in tasks], frozenset(wanted)) == code


def test_the_table_shows_running_tasks_first_and_takes_names_literally() -> None:
    def shown(name: str, **status: Any) -> TaskRow:
        return row(task(name, **status))

    console = Console(width=100, record=True, file=io.StringIO())
    held = {"tokensPerSecond": "50", "eta": "1m"}
    rows = [row(SUCCEEDED), shown("[bold]z", state="Training", step=1, totalSteps=4, loss="0.5", **held)]
    console.print(table(rows))
    lines = console.export_text().splitlines()
    assert lines[0].split() == ["NAME", "STATE", "REASON", "PRIORITY", "PROGRESS", "LOSS", "TOKENS/S", "ETA"]
    assert lines[1].split() == ["[bold]z", "Training", "3", "1/4", "0.5", "50", "1m"]
    assert lines[2].split() == ["a", "Succeeded", "R", "3", "12/12"]


def test_the_table_of_all_namespaces_names_them() -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(table([row(TRAINING)], everywhere=True))
    lines = console.export_text().splitlines()
    assert [line.split()[:3] for line in lines] == [
        ["NAMESPACE", "NAME", "STATE"],
        ["default", "a", "Training"],
    ]


def test_names_are_of_one_namespace() -> None:
    with pytest.raises(CommandError, match="leave the names out"):
        watch(names=["a"], all_namespaces=True)


def test_a_task_that_is_deleted_is_told_of_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    view = JsonRows()
    view.show({"default/a": row(TRAINING)})
    view.show({})
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last == {"namespace": "default", "name": "a", "deleted": True}
