"""Bars below a notebook's cell, by what IPython offers where a kernel runs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from mlora import Client
from mlora.notebook import NotebookBars, notebook
from tests.fixtures.kube_server import KubeServer
from tests.unit.mlora.test_client import SUCCEEDED


class Cell:
    """The output of a cell: what was shown, one text after the other."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def show(self, data: Mapping[str, str], **_: Any) -> Cell:
        self.texts.append(data["text/plain"])
        return self

    def update(self, data: Mapping[str, str], *, raw: bool) -> None:
        assert raw
        self.texts.append(data["text/plain"])


def task(name: str, state: str, step: int = 0, **status: Any) -> dict[str, Any]:
    told = {"state": state, "step": step, "totalSteps": 8, **status}
    return {"metadata": {"namespace": "a", "name": name}, "spec": {}, "status": told}


def test_each_task_has_a_line_and_columns_stand_below_each_other() -> None:
    cell = Cell()
    with NotebookBars(cell.show) as bars:
        bars.task_changed(task("a", "Queued"))
        bars.task_changed(task("much-longer", "Training", 4, loss="1.25", tokensPerSecond="90"))
    assert cell.texts[-1].splitlines() == [
        "a            Queued    ░░░░░░░░░░░░░░░░░░░░░░░░  0/8",
        "much-longer  Training  ████████████░░░░░░░░░░░░  4/8  loss 1.25  90 tokens/s",
    ]


def test_steps_are_drawn_now_and_then_states_at_once_and_the_last_word_always() -> None:
    cell, now = Cell(), [0.0]
    with NotebookBars(cell.show, lambda: now[0]) as bars:
        for step in range(8):
            now[0] += 0.05
            bars.task_changed(task("a", "Training", step))
        drawn = len(cell.texts)
        assert drawn == 2
        bars.task_changed(task("a", "Saving", 8))
        assert len(cell.texts) == drawn + 1
        bars.task_changed(task("a", "Saving", 8, loss="0.5"))
        assert len(cell.texts) == drawn + 1
    assert "loss 0.5" in cell.texts[-1]


def test_a_name_from_elsewhere_begins_no_line_of_its_own() -> None:
    cell = Cell()
    with NotebookBars(cell.show) as bars:
        bars.task_changed(task("a", "Failed", reason="x\ny"))
    assert len(cell.texts[-1].splitlines()) == 1


@pytest.mark.parametrize(("kernel", "there"), [(object(), True), (None, False)])
def test_a_terminal_of_ipython_is_no_notebook(
    monkeypatch: pytest.MonkeyPatch, kernel: object, there: bool
) -> None:
    shell = SimpleNamespace(kernel=kernel) if kernel else SimpleNamespace()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))  # type: ignore[arg-type]
    assert (notebook() is not None) is there


def test_wait_draws_in_a_notebook_and_is_quiet_where_nobody_looks(
    kube: KubeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kube.task("bot", SUCCEEDED)
    Client().wait("bot")
    assert capsys.readouterr() == ("", "")
    Client().wait("bot", progress=True)
    assert capsys.readouterr() == ("", "bot: Succeeded\n")

    cell = Cell()
    display = SimpleNamespace(display=cell.show)
    shell = SimpleNamespace(kernel=object())
    ipython = SimpleNamespace(get_ipython=lambda: shell, display=display)
    monkeypatch.setitem(sys.modules, "IPython", ipython)  # type: ignore[arg-type]
    Client().wait("bot", progress=False)
    assert not cell.texts
    Client().wait("bot")
    assert cell.texts[-1].startswith("bot  Succeeded")
    assert capsys.readouterr() == ("", "")
