"""How ``mlora run`` shows a run: bars for people, lines of JSON for programs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.text import Text

from mlora_operator.cli.output import print_json, stderr, stdout
from mlora_operator.cli.task_table import TaskRow, as_json, row
from mlora_operator.local.audience import Audience
from mlora_operator.local.ending import End, Result
from mlora_operator.reconcile.state.decision import Event
from mlora_worker.lines import headed, one_line


class ProgressView(Audience, AbstractContextManager["ProgressView"], Protocol):
    """Where the run is shown."""

    def ended(self, ends: list[End], folder: Path) -> None: ...


class JsonProgress(nullcontext[Any]):
    """JSON: an object for each change of a task, each event, and the end."""

    def task_changed(self, task: Mapping[str, Any]) -> None:
        print_json({"type": "task", **as_json(row(task))})

    def happened(self, event: Event) -> None:
        print_json(
            {
                "type": "event",
                "kind": event.kind,
                "about": str(event.about),
                "severity": event.type,
                "reason": event.reason,
                "message": event.message,
            }
        )

    def ended(self, ends: list[End], folder: Path) -> None:
        results = [
            {
                "namespace": end.namespace,
                "name": end.name,
                "result": end.result.value,
                "reason": end.cause.reason,
                "message": end.cause.message,
            }
            for end in ends
        ]
        print_json({"type": "end", "tasks": results, "state": str(folder)})


def shown_words(shown: TaskRow) -> tuple[str, str, str, str]:
    """Beside a task's bar: state, steps, loss, speed; nothing for what is not known yet."""
    return (
        one_line(shown.state if shown.reason in ("", shown.state) else f"{shown.state} ({shown.reason})"),
        f"{shown.step}/{shown.total_steps}" if shown.total_steps else "",
        one_line(f"loss {shown.loss}") if shown.loss else "",
        one_line(f"{shown.tokens_per_second} tokens/s") if shown.tokens_per_second else "",
    )


class Bars:
    """A progress bar for each task on a terminal; one line for each new state elsewhere."""

    def __init__(self) -> None:
        self._console = stderr()
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            TextColumn("{task.fields[state]}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[progress]}", justify="right", markup=False),
            TextColumn("{task.fields[loss]}", justify="right", markup=False),
            TextColumn("{task.fields[speed]}", justify="right", markup=False),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._bars: dict[tuple[str, str], TaskID] = {}
        self._told: dict[tuple[str, str], str] = {}

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def task_changed(self, task: Mapping[str, Any]) -> None:
        shown = row(task)
        key = (shown.namespace, shown.name)
        state, steps, loss, speed = shown_words(shown)
        fields: dict[str, Any] = {
            "total": shown.total_steps or None,
            "completed": shown.step,
            "state": state,
            "progress": steps,
            "loss": loss,
            "speed": speed,
        }
        if key not in self._bars:
            self._bars[key] = self._progress.add_task(shown.name, **fields)
        else:
            self._progress.update(self._bars[key], **fields)
        if not self._console.is_terminal and self._told.get(key) != state:
            self._console.print(Text(f"{shown.name}: {state}"))
            self._told[key] = state

    def happened(self, event: Event) -> None:
        if event.type == "Warning":
            self._progress.console.print(
                Text(headed(f"{event.about}: {event.reason}: {event.message}"), style="yellow")
            )

    def ended(self, ends: list[End], folder: Path) -> None:
        for end in ends:
            if end.result is Result.SUCCEEDED:
                stdout().print(Text.assemble((f"{end.name}: ", "bold"), (headed(end.cause.message), "green")))
            else:
                style = "red" if end.bad else "dim"
                words = f"{end.result.value}: {end.cause}"
                stderr().print(Text.assemble((f"{end.name}: ", "bold"), (headed(words), style)))
        if any(end.bad for end in ends):
            stderr().print(f"state and logs: {folder}")
