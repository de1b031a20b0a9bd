"""A pool's threads are there before there is work, so that work never fails for want of one."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

import mlora_worker.__main__ as rank
from mlora_worker.protocol import ModelSource, WorkerConfig
from mlora_worker.rank import start
from mlora_worker.runtime.threads import started_pool


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


class Left(Exception):
    """In place of the end of the process."""


def test_a_thread_that_runs_python_holds_up_one_that_computes_for_less_than_a_millisecond(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a rank, from its start. What the start does to the process beside that is left out here."""
    config = WorkerConfig(
        pipeline="n/p",
        model=ModelSource(name="m", uri=tmp_path.as_uri()),
        stages=1,
        coordinator_host="h",
        token_file="t",
    )
    monkeypatch.setenv("MLORA_WORKER_CONFIG", config.to_json())
    monkeypatch.setenv("MLORA_RANK", "0")
    for name in ("set_up_logging", "allow_open_files"):
        monkeypatch.setattr(rank, name, lambda *_: None)
    monkeypatch.setattr(rank.signal, "signal", lambda *_: None)

    def leave(code: int) -> None:
        raise Left(code)

    monkeypatch.setattr(rank, "_leave", leave)
    in_the_rank: list[float] = []
    monkeypatch.setattr(start, "run_rank", lambda *_: in_the_rank.append(sys.getswitchinterval()))
    usual = sys.getswitchinterval()
    try:
        with pytest.raises(Left, match="0"):
            rank.main()
    finally:
        sys.setswitchinterval(usual)
    assert in_the_rank[0] < 1e-3 < usual
