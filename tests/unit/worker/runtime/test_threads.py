"""A pool's threads are there before there is work, so that work never fails for want of one."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mlora_worker.protocol import ModelSource, WorkerConfig
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


RANK = """
import sys
import mlora_worker.__main__ as rank
import mlora_worker.rank.start

mlora_worker.rank.start.run_rank = lambda *_: print(sys.getswitchinterval())
rank.main()
"""


def test_a_thread_that_runs_python_holds_up_one_that_computes_for_less_than_a_millisecond(
    tmp_path: Path,
) -> None:
    config = WorkerConfig(
        pipeline="n/p",
        model=ModelSource(name="m", uri=tmp_path.as_uri()),
        stages=1,
        coordinator_host="h",
        token_file="t",
    )
    environment = {**os.environ, "MLORA_WORKER_CONFIG": config.to_json(), "MLORA_RANK": "0"}
    done = subprocess.run(
        [sys.executable, "-c", RANK], env=environment, check=True, capture_output=True, text=True, timeout=300
    )
    assert float(done.stdout) < 1e-3 < sys.getswitchinterval()
