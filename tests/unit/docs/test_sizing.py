"""What the page on sizing says of the processes that prepare rows is what the worker does."""

from __future__ import annotations

import re
from pathlib import Path

from mlora_worker.coordinator.uploads.fair_queue import FairQueue, Ticket
from mlora_worker.data.tokenizing.sandbox_process import MOST_MEMORY
from mlora_worker.data.tokenizing.sandboxed_template import OwnTemplate
from mlora_worker.preparing import bounds
from mlora_worker.rank import first

PAGE = Path(__file__).parents[3] / "docs" / "operators" / "sizing.md"
AT_START = 22  # MiB, of a template's process
PREPARATION = 142  # MiB, of the preparation process
MIB = 2**20


def test_the_most_that_they_take_is_told() -> None:
    lanes = 2  # new rows, and rows of tasks that have trained
    many = [Ticket("one namespace", number) for number in range(99)]
    turns = FairQueue(first.PREPARING)
    for ticket in many:
        turns.enter(ticket, 0.0)
    most, of_one = lanes * first.PREPARING, lanes * len(turns.begin(0.0))
    page = PAGE.read_text(encoding="utf-8")
    assert f"at most {MOST_MEMORY // MIB} MiB more than at its start |" in page
    assert f"at most {bounds.most_of_one(None) // MIB} MiB more than at its start, which the kernel" in page
    assert f"at most {most} in a pod, at most {of_one} of one namespace" in page
    together, least = bounds.most_of_all(None) // MIB, bounds.most_of_all(0) // MIB
    assert f"at most {together} MiB; a quarter of the pod's limit where that is less, but {least} MiB" in page
    assert bounds.most_of_all(4096 * MIB) == 1024 * MIB, "a quarter"
    assert f"by {together + PREPARATION} MiB, or by a quarter of that limit and {PREPARATION} MiB" in page


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
