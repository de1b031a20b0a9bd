"""What a store refuses is tried again for as long as the task is wanted, its report says why, and it holds nobody up."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from itertools import islice

import pytest

from mlora_worker.coordinator.patience import Attempt, CallLater, Lane, Patience, Withdrawn, pauses
from mlora_worker.coordinator.tasks import TaskRun
from mlora_worker.data.errors import Interrupted
from mlora_worker.protocol import (
    Dataset,
    FailureReason,
    LoRAConfig,
    StorageAccess,
    TaskPhase,
    TaskPlan,
    Training,
)
from mlora_worker.storage.errors import AccessRefused, StorageError, StoreUnreachable
from tests.fixtures.inline import Inline, Waiting, after, inline_lane


def run(name: str = "a", namespace: str = "n", endpoint: str | None = None) -> TaskRun:
    return TaskRun(
        TaskPlan(
            uid=f"{namespace}-{name}", namespace=namespace, name=name, base_model="m", lora=LoRAConfig(),
            dataset=Dataset(inline="{}"), training=Training(), output_uri="s3://b/p",
            storage=StorageAccess(region="old", endpoint=endpoint),
        )
    )  # fmt: skip


def patience(later: CallLater, on_change: Callable[[], None] = lambda: None) -> Patience:
    return Patience(changed=threading.Condition(), on_change=on_change, later=later)


def test_pauses_grow_to_half_a_minute_and_never_end() -> None:
    assert list(islice(pauses(), 8)) == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_a_store_that_refuses_for_long_is_tried_until_it_takes_what_it_gets_with_the_newest_keys() -> None:
    task, rested, used, said = run(), list[float](), list[str](), list[str]()

    def work() -> str:
        used.append(task.plan.storage.region)
        if len(used) < 20:
            raise AccessRefused("unknown key")
        return "stored"

    def pause(seconds: float) -> None:
        rested.append(seconds)
        assert task.blocked is not None
        assert task.blocked.reason is FailureReason.ACCESS_DENIED
        said.append(task.blocked.message)
        task.plan = task.plan.model_copy(update={"storage": StorageAccess(region=f"new-{len(rested)}")})

    changes, found, lost = list[None](), list[str](), list[Exception]()
    patience(after(pause), lambda: changes.append(None)).begin(
        inline_lane(), Attempt(task, "uploading the adapter", work, found.append, lost.append)
    )
    assert (found, lost) == (["stored"], [])
    assert len(rested) == 19
    assert max(rested) == 30.0
    assert used == ["old", *(f"new-{number}" for number in range(1, 20))]
    assert set(said) == {"uploading the adapter failed and is tried again: unknown key"}
    assert task.blocked is None
    assert len(changes) == 20, "each refusal is reported, and so is the end of the trouble"


def attempt(task: TaskRun, error: Exception) -> list[Exception]:
    """What it is given up for, when the task is deleted in the first pause."""
    lost: list[Exception] = []

    def work() -> None:
        raise error

    def pause(_: float) -> None:
        task.withdrawn = True

    patience(after(pause)).begin(
        inline_lane(), Attempt(task, "writing a checkpoint", work, lambda _: pytest.fail("done"), lost.append)
    )
    return lost


def test_nobody_tries_for_a_task_that_was_deleted() -> None:
    [lost] = attempt(run(), StoreUnreachable("away"))
    assert isinstance(lost, Withdrawn)


def test_what_is_not_the_stores_fault_is_final() -> None:
    error = KeyError("x")
    assert attempt(run(), error) == [error]


def test_a_full_volume_keeps_its_words() -> None:
    task = run()
    attempt(
        task, StorageError(FailureReason.INSUFFICIENT_SPACE, "cannot write: no space left on that volume")
    )
    assert task.blocked is not None
    assert "no space left on that volume" in task.blocked.message
    assert task.blocked.reason is FailureReason.INSUFFICIENT_SPACE


PASSING = [
    (MemoryError(), FailureReason.INTERNAL_ERROR, "lacks memory"),
    (RuntimeError("can't allocate memory: you tried to allocate 9 bytes"), FailureReason.INTERNAL_ERROR, "lacks"),
    (RuntimeError("can't start new thread"), FailureReason.INTERNAL_ERROR, "lacks memory, files or processes"),
    (OSError(errno.EMFILE, "Too many open files"), FailureReason.INTERNAL_ERROR, "Too many open files"),
    (OSError(errno.ENOSPC, "No space left"), FailureReason.INSUFFICIENT_SPACE, "own volume is full"),
    (Interrupted(FailureReason.INVALID_ROW, "was killed"), FailureReason.INTERNAL_ERROR, "was killed"),
]  # fmt: skip


@pytest.mark.parametrize(("error", "reason", "told"), PASSING, ids=lambda value: str(value)[:20])
def test_what_the_machine_lacks_is_waited_for_and_fails_no_task(
    error: Exception, reason: FailureReason, told: str
) -> None:
    task, tries, found, lost = run(), list[None](), list[str](), list[Exception]()

    def work() -> str:
        tries.append(None)
        if len(tries) < 20:
            raise error
        return "restored"

    def pause(_: float) -> None:
        assert task.blocked is not None
        assert task.blocked.reason is reason
        assert told in task.blocked.message

    patience(after(pause)).begin(
        inline_lane(), Attempt(task, "fetching a checkpoint", work, found.append, lost.append)
    )
    assert (found, lost, task.blocked) == (["restored"], [], None)


@pytest.mark.parametrize(("error", "_", "__"), PASSING, ids=lambda value: str(value)[:20])
def test_for_a_task_that_never_trained_it_is_tried_six_times_and_then_it_is_the_tasks_fault_after_all(
    error: Exception, _: FailureReason, __: str
) -> None:
    task, rested, lost = run(), list[float](), list[Exception]()

    def work() -> None:
        raise error

    patience(after(rested.append)).begin(
        inline_lane(), Attempt(task, "fetching its rows", work, pytest.fail, lost.append, endless=False)
    )
    assert rested == [1.0, 2.0, 4.0, 8.0, 16.0]
    assert (lost, task.blocked) == ([error], None)


@pytest.mark.parametrize(
    ("phase", "told"),
    [
        (TaskPhase.PREPARING, FailureReason.DATASET_NOT_FOUND),
        (TaskPhase.TRAINING, FailureReason.UPLOAD_FAILED),
        (TaskPhase.SAVING, FailureReason.UPLOAD_FAILED),
    ],
)
def test_what_is_missing_once_the_rows_are_here_is_the_place_of_the_output(
    phase: TaskPhase, told: FailureReason
) -> None:
    task = run()
    task.phase = phase
    attempt(task, StorageError(FailureReason.DATASET_NOT_FOUND, "the bucket is gone"))
    assert task.blocked is not None
    assert task.blocked.reason is told


class Pool(Waiting):
    """With one thread."""

    def step(self) -> bool:
        """Whether there was something to do."""
        if not self.waiting:
            return False
        self.waiting.pop(0)()
        return True


class Tried:
    """Work that a store that is away refuses, and work that goes well, with what became of it."""

    def __init__(self, lane: Lane) -> None:
        self.put_off: list[Callable[[], None]] = []
        self.lane, self.names, self.done = lane, list[str](), list[str]()
        self.patience = patience(lambda _, call: self.put_off.append(call))

    def begin(self, task: TaskRun, error: Exception | None = None, endless: bool = True) -> None:
        def work() -> None:
            self.names.append(task.plan.name)
            if error is not None:
                raise error

        def done(_: None) -> None:
            self.done.append(task.plan.name)

        self.patience.begin(
            self.lane, Attempt(task, "storing it", work, done, lambda _: pytest.fail("lost"), endless=endless)
        )

    def pauses_end(self) -> None:
        put_off, self.put_off = self.put_off, []
        for call in put_off:
            call()


@pytest.mark.parametrize(
    "endless", [True, False], ids=["with a task that has trained", "with one that has not"]
)
def test_however_many_are_refused_again_and_again_a_first_try_finds_a_thread(endless: bool) -> None:
    first, again = Pool(), Pool()
    tried = Tried(Lane(first, again))
    for number in range(100):
        tried.begin(run(f"refused-{number}", namespace=f"n{number}"), StoreUnreachable("away"), endless)
    while first.step():
        pass
    assert len(tried.put_off) == 100, "none of them holds a thread in its pause"
    tried.pauses_end()
    tried.begin(run("well", namespace="another"))
    first.step()
    assert tried.done == ["well"]
    assert len(again.waiting) == 100


def test_what_wants_a_store_that_gave_no_answer_waits_apart_until_the_store_has_answered() -> None:
    first, again = Pool(), Pool()
    tried = Tried(Lane(first, again))
    for name in ("silent-1", "silent-2"):
        tried.begin(run(name, endpoint="http://away"), StoreUnreachable("no answer in 60 s"))
    tried.begin(run("others", namespace="another", endpoint="http://away"))
    tried.begin(run("elsewhere", endpoint="http://here"))
    for _ in range(4):
        first.step()
    assert tried.names == ["silent-1", "others", "elsewhere"], "the second one is not tried in this thread"
    assert len(again.waiting) == 1
    tried.begin(run("answered", endpoint="http://away"))
    first.step()
    while again.step():
        pass
    assert tried.names[-2:] == ["silent-2", "answered"]
    tried.begin(run("later", endpoint="http://away"))
    first.step()
    assert tried.done == ["others", "elsewhere", "answered", "later"]


def test_a_store_that_answers_no_is_not_silent() -> None:
    tried = Tried(Lane(Inline(), Pool()))
    tried.begin(run("refused"), AccessRefused("no"))
    tried.begin(run("well"))
    assert tried.done == ["well"]
