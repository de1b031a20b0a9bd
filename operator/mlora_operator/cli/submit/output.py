"""How ``mlora submit`` speaks: lines for a log, or an object a line for programs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rich.text import Text

from mlora_operator.cli.kube.client import JSON
from mlora_operator.cli.output import print_json, stderr, stdout
from mlora_operator.cli.submit.applying import Submitted
from mlora_operator.cli.submit.awaiting import Waiting
from mlora_operator.cli.submit.journal import JournalEntry
from mlora_operator.cli.submit.outcomes import TaskResult
from mlora_operator.cli.task_table import as_json, row
from mlora_worker.lines import headed, one_line

_LAST_LINES = 20  # of a failure's message
_LAST_EVENTS = 5


class SubmitProgress:
    """Text goes to standard output, a line at a time; why a task failed goes to standard error."""

    def __init__(self, json: bool) -> None:
        self._json = json

    def said(self, text: str) -> None:
        if not self._json:
            stdout().print(Text(headed(text)))

    def note(self, text: str) -> None:
        """Something beside the course of things."""
        if self._json:
            print_json({"type": "note", "message": text})
        else:
            stderr().print(Text(headed(text), style="yellow"))

    def submitted(self, tasks: Sequence[Submitted]) -> None:
        if self._json:
            for one in tasks:
                about = {"namespace": one.namespace, "name": one.name, "uid": one.uid}
                print_json({"type": "submitted", **about, "action": one.step.value})

    def entry(self, one: JournalEntry) -> None:
        if self._json:
            print_json(one.data)
            return
        moment = time.strftime("%H:%M:%S", time.gmtime())
        style = "red" if one.bad else "green" if one.good else ""
        stdout().print(Text.assemble((moment, "dim"), " ", (headed(one.text), style)))

    def failure(self, task: JSON, outcome: TaskResult, events: Sequence[JSON]) -> None:
        """The last words of a task that did not succeed."""
        if self._json:
            return  # the end has them
        shown = row(task)
        lines = shown.message.splitlines()[-_LAST_LINES:]
        known = set(lines)
        lines += [
            one_line(f"{one.get('reason', '')}: {one.get('message', '')}")
            for one in events[-_LAST_EVENTS:]
            if one.get("message") not in known
        ]
        head = f"{shown.name} {'failed' if outcome is TaskResult.FAILED else 'is rejected'}: {shown.reason}"
        stderr().print(Text(one_line(head), style="bold red"))
        for line in lines:
            stderr().print(Text(f"  {line}"))

    def ended(self, waiting: Waiting, code: int) -> None:
        if self._json:
            tasks = [_result(waiting, key) for key in waiting.tasks]
            print_json({"type": "end", "exitCode": code, "tasks": tasks})
            return
        for key, task in waiting.tasks.items():
            outcome = waiting.outcomes.get(key)
            if outcome is TaskResult.SUCCEEDED:
                where = one_line(row(task).adapter or task["spec"]["output"]["uri"])
                stdout().print(Text.assemble((f"{key[1]}: ", "bold"), (f"succeeded, {where}", "green")))
            elif outcome is TaskResult.GONE:
                stderr().print(Text(f"{key[1]}: was deleted by someone else", style="red"))


def _result(waiting: Waiting, key: tuple[str, str]) -> dict[str, Any]:
    task = waiting.tasks[key]
    about = {"namespace": key[0], "name": key[1]}
    outcome = waiting.outcomes.get(key)
    result = {"result": outcome.value if outcome is not None else None}
    return {**about, **(as_json(row(task)) | {"uid": task["metadata"]["uid"]} if task else {}), **result}
