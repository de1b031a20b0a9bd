"""While a disk reads what a reference thinks of rows, the coordinator's lock is free: reports go out, and tasks load."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, cast

import pytest

from mlora_worker.coordinator.uploads.timer import DelayedCalls
from mlora_worker.data.training_rows.reference_files import ReferenceFiles
from mlora_worker.stream.items import Evaluate, Load
from tests.unit.worker.coordinator.dispatch.test_reference_forwards import compared
from tests.unit.worker.coordinator.test_service import coordinator


class HangingDisk(ReferenceFiles):
    """Answers no read until it is ``freed``."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "base")
        self.asked, self.freed = threading.Event(), threading.Event()

    def read(self, *arguments: Any) -> Any:
        self.asked.set()
        assert self.freed.wait(60)
        return super().read(*arguments)


def test_a_disk_that_hangs_holds_up_the_forwards_of_its_own_task_alone(tmp_path: Path) -> None:
    disk, changed = HangingDisk(tmp_path), threading.Condition(threading.RLock())
    one = coordinator(cast(Any, pytest.fail), [], DelayedCalls(), references=disk, changed=changed)
    for task in (compared("a"), compared("b", first=40)):
        one._tasks[task.uid] = task  # as if their rows had been fetched
    loaded: list[Any] = []

    def load() -> None:
        with changed:
            loaded.extend(one.supply() for _ in range(3))

    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    try:
        assert disk.asked.wait(30)
        thread.join(10)
        assert not thread.is_alive(), "a task is loaded only once the disk has answered"
        assert [type(entry.item) for entry in loaded[:2]] == [Load, Load]
        assert loaded[2] is None, "nothing is asked for that may be known"
        assert changed.acquire(timeout=10)
        changed.release()
        assert {report.uid for report in one.wait_report(-1, 0).tasks} == {"a", "b"}
    finally:
        disk.freed.set()
    sequence = one.wait_report(-1, 0).sequence
    with changed:
        assert changed.wait_for(lambda: isinstance(getattr(one.supply(), "item", None), Evaluate), timeout=30)
    assert one.wait_report(-1, 0).sequence > sequence
