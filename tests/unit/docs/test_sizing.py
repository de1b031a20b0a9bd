"""What the page on sizing says of template processes is what the worker does."""

from __future__ import annotations

import re
from pathlib import Path

from mlora_worker import rank
from mlora_worker.coordinator.store_turns import StoreTurns, Ticket
from mlora_worker.data.own_template import OwnTemplate
from mlora_worker.data.template_process import MOST_MEMORY

PAGE = Path(__file__).parents[3] / "docs" / "operators" / "sizing.md"
AT_START = 22  # MiB


def test_the_most_that_template_processes_take_is_told() -> None:
    lanes = 2  # new rows, and rows of tasks that have trained
    many = [Ticket("one namespace", number) for number in range(99)]
    turns = StoreTurns(rank._PREPARING)
    for ticket in many:
        turns.enter(ticket, 0.0)
    most, of_one = lanes * rank._PREPARING, lanes * len(turns.begin(0.0))
    bound = MOST_MEMORY // 2**20
    page = PAGE.read_text(encoding="utf-8")
    assert f"{bound} MiB more than at its start" in page
    assert f"at most {most} in a pod, at most {of_one} of one namespace" in page
    assert f"| {most * (bound + AT_START)} MiB |" in page
    assert f"Two at their bounds, {2 * (bound + AT_START)} MiB" in page


def test_one_with_an_ordinary_template_takes_about_what_is_told() -> None:
    template = OwnTemplate("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    try:
        template.render([{"role": "user", "content": "hi"}])
        status = Path(f"/proc/{template.pid}/status").read_text()
    finally:
        template.close()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    assert int(found[1]) / 1024 < 1.5 * AT_START
    assert f"{AT_START} MiB of resident memory" in PAGE.read_text(encoding="utf-8")
