"""Rows that another process makes: the same rows, its errors, its end, and what nobody can see of it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from mlora_worker.data.errors import DataError, Interrupted
from mlora_worker.data.reading.row_bounds import most_text
from mlora_worker.data.task_rows import TaskRows
from mlora_worker.data.tokenizing.tokenizer import load_tokenizer
from mlora_worker.data.training_rows.token_rows import rows_digest
from mlora_worker.preparing import bounds
from mlora_worker.preparing.client import RowProcess
from mlora_worker.preparing.maker import Cancelled, RowsHere
from mlora_worker.preparing.messages import Setup
from mlora_worker.protocol import Dataset, DatasetFormat, FailureReason, TaskPlan
from mlora_worker.storage.errors import ObjectNotFound
from mlora_worker.storage.object_store.store import open_store
from tests.fixtures.tiny_model import CHATML
from tests.integration.preparing.conftest import ROWS, SECRET, SlowServer

pytestmark = pytest.mark.integration

MakeTask = Callable[..., TaskPlan]
_DEADLINE = 60.0


@pytest.fixture
def rows(shared: RowProcess) -> Iterator[RowProcess]:
    """With no job at the beginning, and none at the end."""
    until(lambda: not jobs_of(shared), "the former test's jobs are reaped")
    yield shared
    until(lambda: not jobs_of(shared), "jobs end and are reaped")


def make(rows: RowProcess, task: TaskPlan) -> TaskRows:
    return rows.make(task, None, lambda: True)


def jobs_of(rows: RowProcess) -> list[int]:
    assert rows.pid is not None
    return list(bounds.children(rows.pid))


def until(done: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _DEADLINE
    while not done():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:1]
    except OSError:
        return False


class Jobs:
    """Rows that are being made in threads."""

    def __init__(self, rows: RowProcess) -> None:
        self._rows, self._pool = rows, ThreadPoolExecutor(8)
        self._uids: list[str] = []

    def begin(self, task: TaskPlan) -> Future[TaskRows]:
        self._uids.append(task.uid)
        return self._pool.submit(make, self._rows, task)

    def end(self) -> None:
        for uid in self._uids:
            self._rows.cancel(uid)
        self._pool.shutdown()


@pytest.fixture
def jobs(rows: RowProcess) -> Iterator[Jobs]:
    made = Jobs(rows)
    yield made
    made.end()


WEIGHTED = '{"prompt": "a?", "completion": "b", "w": 2}\n{"prompt": "c?", "completion": "d", "w": 1}\n' * 10
OWN = CHATML.replace("<|im_start|>", "<|im_start|>by the task: ")
CASES: dict[str, tuple[str, dict[str, object], dict[str, object] | None]] = {  # rows, dataset, evaluation
    "plain": (ROWS, {}, None),
    "held out": (ROWS, {"heldOut": 0.25}, {"everySteps": 1}),
    "evaluated elsewhere": (ROWS, {}, {"everySteps": 1, "uri": "OTHER", "limit": 3}),
    "weights, a sample": (WEIGHTED, {"fields": {"weight": "w"}, "limit": 7, "shuffleSeed": 3}, None),
    "own template": (ROWS, {"chatTemplate": OWN}, None),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("times", [1, 2], ids=["made", "kept"])
def test_they_are_the_rows_that_would_be_made_here(
    shared: RowProcess, setup: Setup, make_task: MakeTask, case: str, times: int
) -> None:
    written, changes, evaluation = CASES[case]
    if evaluation is not None and "uri" in evaluation:
        evaluation = evaluation | {"uri": make_task("other").dataset.uri}
    task = make_task(rows=written, evaluation=evaluation)
    dataset = task.dataset.model_dump(mode="json", by_alias=True) | changes
    task = task.model_copy(update={"dataset": Dataset.model_validate(dataset)})
    here = RowsHere(
        load_tokenizer(Path(setup.folder)),
        setup.max_positions,
        setup.vocabulary,
        lambda access: open_store(access, allow_files=True),
    ).make(task, None, lambda: True)
    for _ in range(times):
        there = make(shared, task)
    assert (there.counts, there.load) == (here.counts, here.load)
    assert (there.evaluation is None) == (here.evaluation is None) == (evaluation is None)
    pairs = [(there.train, here.train)]
    if there.evaluation is not None and here.evaluation is not None:
        pairs.append((there.evaluation, here.evaluation))
    for one, other in pairs:
        assert len(one) == len(other) > 0
        assert one.digest() == other.digest() == rows_digest(one)
        assert one.supervised.tolist() == other.supervised.tolist()
        assert one.weights.tolist() == other.weights.tolist()
        assert all(np.array_equal(a.labels, b.labels) for a, b in zip(one, other, strict=True))


def test_errors_arrive_as_what_they_were(shared: RowProcess, make_task: MakeTask) -> None:
    with pytest.raises(DataError, match=r"a\.jsonl has invalid rows: line 1: .*") as invalid:
        make(shared, make_task(rows="{}\n"))
    assert invalid.value.reason is FailureReason.INVALID_ROW
    with pytest.raises(ObjectNotFound) as missing:
        make(shared, make_task(dataset={"uri": "file:///nowhere/rows.jsonl"}))
    assert missing.value.reason is FailureReason.DATASET_NOT_FOUND


def test_nothing_of_torch_is_in_it(shared: RowProcess) -> None:
    assert shared.pid is not None
    maps = Path(f"/proc/{shared.pid}/maps").read_text()
    assert "tokenizers" in maps
    assert not re.findall(r"\S*(?:libtorch|libc10|/torch/)\S*", maps)
    assert len(list(Path(f"/proc/{shared.pid}/task").iterdir())) == 1, "it forks, so it has no other threads"


def test_a_job_that_breaks_its_process_fails_alone(
    rows: RowProcess, jobs: Jobs, make_task: MakeTask, slow_server: SlowServer
) -> None:
    waiting = jobs.begin(make_task("waiting", dataset={"uri": slow_server.url}))
    assert slow_server.asked.acquire(timeout=_DEADLINE)
    (first,) = jobs_of(rows)
    broken = jobs.begin(make_task("broken", dataset={"uri": slow_server.url}))
    assert slow_server.asked.acquire(timeout=_DEADLINE)
    (second,) = set(jobs_of(rows)) - {first}
    server = rows.pid
    os.kill(second, signal.SIGSEGV)
    with pytest.raises(DataError, match=r"broke \(SIGSEGV\)") as error:
        broken.result(_DEADLINE)
    assert not isinstance(error.value, Interrupted), "its rows may well do it again"
    assert error.value.reason is FailureReason.INTERNAL_ERROR
    assert len(make(rows, make_task("after")).train) == 40
    slow_server.go_on.set()
    assert len(waiting.result(_DEADLINE).train) == 40
    assert rows.pid == server


def test_a_job_whose_process_is_killed_may_be_tried_again(
    rows: RowProcess, jobs: Jobs, make_task: MakeTask, slow_server: SlowServer
) -> None:
    killed = jobs.begin(make_task(dataset={"uri": slow_server.url}))
    assert slow_server.asked.acquire(timeout=_DEADLINE)
    (pid,) = jobs_of(rows)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(Interrupted, match=r"was killed, most likely because .* ran out of memory") as error:
        killed.result(_DEADLINE)
    assert error.value.reason is FailureReason.OUT_OF_MEMORY


def test_what_is_cancelled_ends_at_once_and_leaves_nothing(
    rows: RowProcess, jobs: Jobs, make_task: MakeTask, slow_server: SlowServer, cache: Path
) -> None:
    cancelled = jobs.begin(make_task("a", dataset={"uri": slow_server.url, "chatTemplate": OWN}))
    other = jobs.begin(make_task("b", dataset={"uri": slow_server.url}))
    for _ in range(2):
        assert slow_server.asked.acquire(timeout=_DEADLINE)
    before = set(jobs_of(rows))
    with_template = next(job for job in before if list(bounds.children(job)))
    (template,) = bounds.children(with_template)
    rows.cancel("a")
    with pytest.raises(Cancelled):
        cancelled.result(_DEADLINE)
    until(lambda: set(jobs_of(rows)) == before - {with_template}, "its process is gone")
    until(lambda: not is_alive(template), "and its template's")
    until(lambda: len(list(cache.glob("*/*.partial"))) == 1, "what it wrote is gone, the other's is not")
    slow_server.go_on.set()
    assert len(other.result(_DEADLINE).train) == 40


def test_what_nobody_wants_any_more_is_not_begun(shared: RowProcess, make_task: MakeTask) -> None:
    with pytest.raises(Cancelled):
        shared.make(make_task(), None, lambda: False)


def test_no_key_of_a_task_is_to_be_seen(
    rows: RowProcess, jobs: Jobs, make_task: MakeTask, slow_server: SlowServer
) -> None:
    jobs.begin(make_task(dataset={"uri": slow_server.url}))
    assert slow_server.asked.acquire(timeout=_DEADLINE)
    (job,) = jobs_of(rows)
    assert rows.pid is not None
    for pid in (rows.pid, job):
        for file in ("cmdline", "environ"):
            assert SECRET.encode() not in Path(f"/proc/{pid}/{file}").read_bytes()


def test_a_job_is_less_urgent_than_what_trains_and_goes_first_when_memory_runs_out(
    rows: RowProcess, jobs: Jobs, make_task: MakeTask, slow_server: SlowServer
) -> None:
    jobs.begin(make_task(dataset={"uri": slow_server.url}))
    assert slow_server.asked.acquire(timeout=_DEADLINE)
    (job,) = jobs_of(rows)
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    for thread in Path(f"/proc/{job}/task").iterdir():
        assert os.getpriority(os.PRIO_PROCESS, int(thread.name)) == max(mine, bounds.MODEST_NICE)
    assert int(Path(f"/proc/{job}/oom_score_adj").read_text()) > 0


def test_rows_that_take_too_much_memory_fail_alone(
    rows: RowProcess, jobs: Jobs, make_task: MakeTask, slow_server: SlowServer
) -> None:
    waiting = jobs.begin(make_task("waiting", dataset={"uri": slow_server.url}))
    assert slow_server.asked.acquire(timeout=_DEADLINE)
    most = most_text(bounds.most_of_one(bounds.container_limit()))
    task = make_task(
        "long", rows=json.dumps({"text": "short"}) + "\n" + json.dumps({"text": "x" * (most + 2**17)})
    )
    as_text = Dataset(uri=task.dataset.uri, format=DatasetFormat.TEXT)
    told = rf"line 2 has {most / 2**20 + 0.125:.1f} MiB of text; a row may have {most / 2**20:g} MiB"
    with pytest.raises(DataError, match=told) as error:
        make(rows, task.model_copy(update={"dataset": as_text}))
    assert error.value.reason is FailureReason.INVALID_ROW
    assert not isinstance(error.value, Interrupted), "it would be so each time"
    slow_server.go_on.set()
    assert len(waiting.result(_DEADLINE).train) == 40


def test_the_longest_rows_are_made_one_after_the_other(rows: RowProcess, make_task: MakeTask) -> None:
    """Each of them takes most of the memory that there is, since each of its bytes is a token."""
    most = most_text(bounds.most_of_one(bounds.container_limit()))
    row = json.dumps({"text": "\u20ac" * (most // 3)}, ensure_ascii=False)
    task = make_task("long", rows="\n".join([row] * 2))
    as_text = Dataset(uri=task.dataset.uri, format=DatasetFormat.TEXT)
    assert len(make(rows, task.model_copy(update={"dataset": as_text})).train) == 2


def test_many_jobs_run_at_once_and_no_file_stays_open(
    rows: RowProcess, jobs: Jobs, make_task: MakeTask, slow_server: SlowServer
) -> None:
    make(rows, make_task("first"))
    before = len(list(Path("/proc/self/fd").iterdir()))
    waiting = [jobs.begin(make_task(f"w{n}", dataset={"uri": slow_server.url})) for n in range(6)]
    for _ in waiting:
        assert slow_server.asked.acquire(timeout=_DEADLINE)
    assert len(make(rows, make_task("quick")).train) == 40
    slow_server.go_on.set()
    made = [one.result(_DEADLINE) for one in waiting]
    assert {len(one.train) for one in made} == {40}, "its files are gone, what they held is here"
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


def test_a_folder_without_a_tokenizer_is_told_when_the_process_is_set_up(
    setup: Setup, tmp_path: Path
) -> None:
    rows = RowProcess()
    try:
        with pytest.raises(DataError, match="no usable tokenizer"):
            rows.set_up(setup.model_copy(update={"folder": str(tmp_path)}))
    finally:
        rows.close()


def test_threads_do_not_wait_for_each_other(rows: RowProcess, make_task: MakeTask) -> None:
    tasks = [make_task(f"t{n}") for n in range(12)]
    made: list[int] = []
    threads = [
        threading.Thread(target=lambda task=task: made.append(len(make(rows, task).train))) for task in tasks
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_DEADLINE)
    assert made == [40] * 12


def test_when_the_preparation_process_ends_its_jobs_may_be_tried_again_in_the_next_one(
    rows: RowProcess, jobs: Jobs, make_task: MakeTask, slow_server: SlowServer
) -> None:
    task = make_task(dataset={"uri": slow_server.url})
    interrupted = jobs.begin(task)
    assert slow_server.asked.acquire(timeout=_DEADLINE)
    (job,), server = jobs_of(rows), rows.pid
    assert server is not None
    os.kill(server, signal.SIGKILL)
    with pytest.raises(Interrupted, match="ended while it prepared the rows"):
        interrupted.result(_DEADLINE)
    until(lambda: not is_alive(job), "a job ends with the process that it was forked from")
    slow_server.go_on.set()
    assert len(make(rows, task).train) == 40
    assert rows.pid != server


def test_all_of_it_ends_with_a_rank_that_is_killed(
    setup: Setup, make_task: MakeTask, slow_server: SlowServer, tmp_path: Path
) -> None:
    task = make_task(dataset={"uri": slow_server.url, "chatTemplate": OWN})
    story = tmp_path / "rank.py"
    story.write_text(RANK)
    rank = subprocess.Popen(
        [sys.executable, str(story), setup.to_json(), task.to_json()], stdout=subprocess.PIPE, text=True
    )
    assert rank.stdout is not None
    try:
        server = int(rank.stdout.readline())
        assert slow_server.asked.acquire(timeout=_DEADLINE)
        (job,) = bounds.children(server)
        until(lambda: bool(list(bounds.children(job))), "its template has a process")
        (template,) = bounds.children(job)
    finally:
        rank.kill()
        rank.wait()
        rank.stdout.close()
    until(lambda: not any(map(is_alive, (server, job, template))), "nothing is left of it")


RANK = """
import sys
from mlora_worker.preparing.client import RowProcess
from mlora_worker.preparing.messages import Setup
from mlora_worker.protocol import TaskPlan

rows = RowProcess().start()
rows.set_up(Setup.model_validate_json(sys.argv[1]))
print(rows.pid, flush=True)
rows.make(TaskPlan.model_validate_json(sys.argv[2]), None, lambda: True)
"""
