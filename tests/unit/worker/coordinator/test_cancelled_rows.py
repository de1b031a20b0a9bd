"""Rows that are being made when their task is taken out of the plan."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from typing import NoReturn

import pytest

from mlora_worker.coordinator.parts import CoordinatorParts
from mlora_worker.coordinator.service import Coordinator
from mlora_worker.preparing.maker import Cancelled
from mlora_worker.protocol import Plan, StageReport, TaskPhase, TaskPlan
from mlora_worker.storage.artifacts.local_spool import LocalSpool
from tests.fixtures.inline import after, inline_pool, pool
from tests.fixtures.memory_store import MemoryStore
from tests.unit.worker.coordinator.test_day import BASE, TASK

SECONDS = 30.0


class Endless:
    """Makes rows until it is told to stop."""

    def __init__(self) -> None:
        self.begun, self.cancelled = threading.Event(), threading.Event()
        self.wanted: Callable[[], bool] = bool

    def uses_date(self, template: str | None) -> bool:
        del template
        return False

    def make(self, task: TaskPlan, day: date | None, wanted: Callable[[], bool]) -> NoReturn:
        del day
        assert wanted()
        self.wanted = wanted
        self.begun.set()
        assert self.cancelled.wait(SECONDS)
        raise Cancelled(task.name)

    def cancel(self, uid: str) -> None:
        assert uid == TASK.uid
        self.cancelled.set()


def test_they_are_cancelled_and_their_task_does_not_fail_for_it() -> None:
    rows = Endless()
    stage = StageReport(
        stage=0, first_layer=0, last_layer=0, device="cpu", resident_bytes=0, capacity_bytes=0
    )
    with ThreadPoolExecutor(1) as threads:
        parts = CoordinatorParts(
            base=BASE, rows=rows, stages=(stage,), run_id="run", microbatch_tokens=100,
            open_store=lambda _: MemoryStore(), announce=lambda *_: None, preparing=pool(threads), resuming=inline_pool(),
            storing=inline_pool(), end=pytest.fail, spool=LocalSpool(None), later=after(lambda _: pytest.fail("no pause")),
        )  # fmt: skip
        one = Coordinator(parts, threading.Condition(threading.RLock()))
        assert one.set_plan(Plan(generation=1, tasks=(TASK,)))
        assert rows.begun.wait(SECONDS)
        assert one.set_plan(Plan(generation=2, tasks=(TASK,)))
        assert not rows.cancelled.is_set(), "it is still wanted"
        assert one.set_plan(Plan(generation=3))
        assert rows.cancelled.is_set()
        assert not rows.wanted()
        failed: list[TaskPhase] = []
        one.set_plan(Plan(generation=4, tasks=(TASK,)))
        failed += [report.phase for report in one.wait_report(-1, 0).tasks]
    assert failed == [TaskPhase.PREPARING], "it is back, and its rows are made anew"
