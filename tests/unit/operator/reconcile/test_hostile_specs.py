"""A task may say whatever its schema allows: that ends no pass, and costs the other tasks little."""

from __future__ import annotations

from typing import Any

from mlora_operator.reconcile.decide import decide
from mlora_operator.reconcile.snapshot import Contact


def test_names_that_are_long_and_unknown_fail_their_task_and_not_the_pass(make: Any) -> None:
    """Named one by one, they are more than a failure has room for."""
    task = make.task(lora={"targetModules": [f"x{number:02d}" * 80 for number in range(64)]})
    contact = Contact(report=make.report())
    snapshot = make.snapshot(task, make.task("other"), group=make.group(), contact=contact)
    statuses = decide(snapshot, make.settings(), make.now).task_statuses
    assert statuses[task.key].reason == "UnknownTargetModule"
    assert len(statuses) == 2
