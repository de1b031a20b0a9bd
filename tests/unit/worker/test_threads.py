"""A pool's threads are there before there is work, so that work never fails for want of one."""

from __future__ import annotations

import threading

import pytest

from mlora_worker.threads import started_pool


def test_all_threads_run_before_the_first_work() -> None:
    pool = started_pool(5, "early")
    assert sum(one.name.startswith("early") for one in threading.enumerate()) == 5
    assert [pool.submit(pow, 2, number).result(10) for number in range(20)] == [2**n for n in range(20)]
    pool.shutdown()


def test_work_is_done_when_no_thread_can_be_started_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = started_pool(2, "early")

    def none_left(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none_left)
    both = threading.Barrier(2)  # each waits for the other: two threads are needed
    assert [one.result(10) for one in (pool.submit(both.wait, 10), pool.submit(both.wait, 10))] in (
        [0, 1],
        [1, 0],
    )
    with pytest.raises(RuntimeError, match="can't start new thread"):
        started_pool(1, "late")
    monkeypatch.undo()
    pool.shutdown()
