"""What a job may take of the machine, tried on processes that take more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mlora_worker.data.errors import Interrupted
from mlora_worker.preparing import bounds
from mlora_worker.preparing.client import RowProcess
from mlora_worker.preparing.handle import ProcessHandle
from mlora_worker.preparing.messages import Setup
from mlora_worker.protocol import FailureReason, TaskPlan

pytestmark = pytest.mark.integration


BUSY = """
import os, json, threading, time
from pathlib import Path
from mlora_worker.preparing import bounds

bounds.MODEST_SECONDS = 0.2
def priorities():
    threads = [int(one.name) for one in Path("/proc/self/task").iterdir()]
    return sorted((os.getpriority(os.PRIO_PROCESS, one), os.sched_getscheduler(one)) for one in threads)

bounds.limit_job(os.getppid(), 2**30)
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
first = priorities()
begun = time.process_time()
while time.process_time() - begun < 0.6:
    sum(range(1000))
print(json.dumps([first, priorities(), int(Path("/proc/self/oom_score_adj").read_text())]))
"""


def test_a_job_that_computes_for_long_lets_all_others_go_first() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BUSY], check=True, capture_output=True, text=True, timeout=300
    )
    first, later, score = json.loads(done.stdout)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert first == [[max(own, bounds.MODEST_NICE), os.SCHED_OTHER]] * 2
    assert later == [[19, os.SCHED_IDLE]] * 2, "both threads"
    assert score == 900


GREEDY = """
import os
from mlora_worker.preparing import bounds

bounds.limit_job(os.getppid(), 64 * 2**20)
kept = bytearray(32 * 2**20)
try:
    bytearray(64 * 2**20)
except MemoryError:
    print("no more")
"""


def test_the_kernel_keeps_a_job_to_its_memory() -> None:
    done = subprocess.run(
        [sys.executable, "-c", GREEDY], check=True, capture_output=True, text=True, timeout=300
    )
    assert done.stdout == "no more\n"


LIFTED = """
import resource
from mlora_worker.preparing import bounds

resource.setrlimit(resource.RLIMIT_DATA, (2**28, resource.getrlimit(resource.RLIMIT_DATA)[1]))
bounds.lift_limits()
bytearray(2**29)
"""


def test_the_limit_of_a_rank_with_a_budget_is_not_that_of_what_it_starts() -> None:
    subprocess.run([sys.executable, "-c", LIFTED], check=True, timeout=300)


# Jobs that have memory instead of making rows; together they may have 300 MiB.
CROWD = """
import sys, time
sys.modules["torch"] = None
from mlora_worker.preparing import bounds, job, process
from mlora_worker.preparing.messages import RowJob, receive

bounds._MOST_OF_ALL = 300 * 2**20
bounds._LEAST_OF_ONE = 1

def do(self, connection):
    asked = RowJob.model_validate_json(receive(connection)[0])
    kept = bytearray(int(asked.task.name) * 2**20)
    time.sleep(600)

job.JobRunner.do = do
process.main(int(sys.argv[1]))
"""


def test_the_largest_job_is_ended_when_all_together_have_too_much(
    setup: Setup, make_task: Callable[..., TaskPlan], tmp_path: Path
) -> None:
    script = tmp_path / "crowd.py"
    script.write_text(CROWD)
    rows = RowProcess(ProcessHandle([sys.executable, str(script)]))
    rows.set_up(setup)
    pool = ThreadPoolExecutor(3)
    try:
        made = {
            size: pool.submit(rows.make, make_task(str(size)), None, lambda: True) for size in (100, 150, 80)
        }
        with pytest.raises(
            Interrupted, match=r"all tasks whose rows are prepared at the same time share"
        ) as error:
            made[150].result(120)
        assert error.value.reason is FailureReason.OUT_OF_MEMORY
        time.sleep(1.0)
        assert not made[100].done()
        assert not made[80].done()
    finally:
        rows.close()
        pool.shutdown()
    for size in (100, 80):
        assert isinstance(made[size].exception(), Interrupted)
