"""What a store refuses is tried again for as long as the task is wanted, its report says why, and it holds nobody up."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from mlora_worker.coordinator.task.run import TaskRun
from mlora_worker.coordinator.uploads.retrier import (
    FEW,
    Attempt,
    CallLater,
    UploadRetrier,
    Withdrawn,
    WorkPool,
)
from mlora_worker.coordinator.uploads.store_identity import output_store
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
from mlora_worker.storage.errors import (
    AccessRefused,
    StorageError,
    StoreBusy,
    StoreUnreachable,
    UselessAnswer,
)
from tests.fixtures.inline import Waiting, after, inline_pool, pool


def run(name: str = "a", namespace: str = "n", endpoint: str | None = None) -> TaskRun:
    return TaskRun(
        TaskPlan(
            uid=f"{namespace}-{name}", namespace=namespace, name=name, base_model="m", lora=LoRAConfig(),
            dataset=Dataset(inline="{}"), training=Training(), output_uri="s3://b/p",
            storage=StorageAccess(region="old", endpoint=endpoint),
        )
    )  # fmt: skip


def retrier(later: CallLater, on_change: Callable[[], None] = lambda: None) -> UploadRetrier:
    return UploadRetrier(changed=threading.Condition(), on_change=on_change, later=later, clock=lambda: 0.0)


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
    retrier(after(pause), lambda: changes.append(None)).begin(
        inline_pool(), Attempt(task, "uploading the adapter", work, found.append, lost.append)
    )
    assert (found, lost) == (["stored"], [])
    assert len(rested) == 19
    assert max(rested) == 30.0
    assert used == ["old", *(f"new-{number}" for number in range(1, 20))]
    assert set(said) == {"uploading the adapter failed and is retried: unknown key"}
    assert task.blocked is None
    assert len(changes) == 20, "each refusal is reported, and so is the end of the trouble"


def attempt(task: TaskRun, error: Exception) -> list[Exception]:
    """What it is given up for, when the task is deleted in the first pause."""
    lost: list[Exception] = []

    def work() -> None:
        raise error

    def pause(_: float) -> None:
        task.withdrawn = True

    retrier(after(pause)).begin(
        inline_pool(), Attempt(task, "writing a checkpoint", work, lambda _: pytest.fail("done"), lost.append)
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
    (MemoryError(), FailureReason.INTERNAL_ERROR, "too little memory"),
    (RuntimeError("can't allocate memory: you tried to allocate 9 bytes"), FailureReason.INTERNAL_ERROR, "too little"),
    (RuntimeError("can't start new thread"), FailureReason.INTERNAL_ERROR, "too few file handles"),
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

    retrier(after(pause)).begin(
        inline_pool(), Attempt(task, "fetching a checkpoint", work, found.append, lost.append)
    )
    assert (found, lost, task.blocked) == (["restored"], [], None)


@pytest.mark.parametrize(("error", "_", "__"), PASSING, ids=lambda value: str(value)[:20])
def test_for_a_task_that_never_trained_it_is_tried_six_times_and_then_it_is_the_tasks_fault_after_all(
    error: Exception, _: FailureReason, __: str
) -> None:
    task, rested, lost = run(), list[float](), list[Exception]()

    def work() -> None:
        raise error

    retrier(after(rested.append)).begin(
        inline_pool(), Attempt(task, "fetching its rows", work, pytest.fail, lost.append, tries=FEW)
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


AWAY = StoreUnreachable("no answer in 60 s")


@dataclass
class Scene:
    """Tries that begin when ``step`` lets the oldest one go, and pauses that end with ``pauses_end``."""

    most: int = 16
    refusals: dict[str, Exception] = field(default_factory=dict)  # by endpoint
    own: dict[str, Exception] = field(default_factory=dict)  # by task
    tried: list[str] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    lost: dict[str, Exception] = field(default_factory=dict)
    put_off: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.threads = Waiting()
        self.pool: WorkPool = pool(self.threads, self.most)
        self.retrier = retrier(lambda _, call: self.put_off.append(call))

    def begin(self, task: TaskRun, **how: Any) -> TaskRun:
        name = task.plan.name

        def work() -> None:
            self.tried.append(name)
            error = self.own.get(name) or self.refusals.get(task.plan.storage.endpoint or "")
            if error is not None:
                raise error

        self.retrier.begin(
            self.pool,
            Attempt(
                task,
                "storing it",
                work,
                done=lambda _: self.done.append(name),
                lost=lambda error: self.lost.update({name: error}),
                store=lambda: output_store(task.plan),
                **({"keep": lambda: self.kept.append(name)} | how),
            ),
        )
        return task

    def step(self) -> bool:
        """Whether there was something to do."""
        if not self.threads.waiting:
            return False
        self.threads.waiting.pop(0)()
        return True

    def steps(self) -> None:
        while self.step():
            pass

    def pauses_end(self) -> None:
        put_off, self.put_off = self.put_off, []
        for call in put_off:
            call()


def blocked(task: TaskRun) -> str:
    assert task.blocked is not None
    return task.blocked.message


@pytest.mark.parametrize("tries", [None, FEW], ids=["tasks that have trained", "tasks that have not"])
def test_however_many_wait_for_a_silent_store_others_find_a_thread(tries: int | None) -> None:
    scene = Scene(refusals={"http://away": AWAY})
    for number in range(64):
        scene.begin(run(f"away-{number}", endpoint="http://away"), tries=tries)
    scene.steps()
    assert len(scene.tried) == 6, "the others know by them that it is silent"
    scene.pauses_end()
    assert len(scene.threads.waiting) == 1, "one of them probes"
    for number, endpoint in enumerate(("http://here", "http://away", "http://here")):
        scene.begin(run(f"other-{number}", namespace=f"m{number}", endpoint=endpoint))
    scene.begin(run("mine", endpoint="http://here"))
    assert len(scene.threads.waiting) == 5


@pytest.mark.parametrize("tries", [None, FEW], ids=["tasks that have trained", "tasks that have not"])
def test_what_a_store_says_of_one_object_is_no_silence_for_the_others(tries: int | None) -> None:
    wrong = UselessAnswer("the hub does not report the commit of owner/name")
    scene = Scene(most=3, own={"wrong": wrong}, refusals={})
    first = scene.begin(run("wrong", endpoint="http://hub"), tries=FEW)
    others = [scene.begin(run(f"t{number}", endpoint="http://hub"), tries=tries) for number in range(8)]
    scene.steps()
    assert scene.done == [f"t{number}" for number in range(8)]
    assert [task.blocked for task in others] == [None] * 8
    for _ in range(3 * FEW):
        scene.pauses_end()
        scene.steps()
    assert (scene.tried.count("wrong"), scene.lost, first.blocked) == (FEW, {"wrong": wrong}, None)


def test_nobody_ends_with_what_a_store_says_of_anothers_object() -> None:
    wrong = {f"t{number}": UselessAnswer(f"no commit of owner/t{number}") for number in range(8)}
    scene = Scene(most=3, own=dict(wrong))
    for name in wrong:
        scene.begin(run(name, endpoint="http://hub"), tries=FEW)
    for _ in range(4 * FEW):
        scene.steps()
        scene.pauses_end()
    assert scene.lost == wrong


def test_who_waits_for_a_silent_store_says_so_keeps_its_work_and_goes_on_when_it_answers() -> None:
    scene = Scene(most=3, refusals={"http://away": AWAY})
    tasks = [scene.begin(run(f"t{number}", endpoint="http://away")) for number in range(4)]
    scene.steps()
    assert scene.tried == ["t0"]
    assert blocked(tasks[0]) == "storing it failed and is retried: no answer in 60 s"
    assert {blocked(task) for task in tasks[1:]} == {"storing it waits for its store: no answer in 60 s"}
    assert sorted(scene.kept) == ["t1", "t2", "t3"]
    tasks.append(scene.begin(run("late", endpoint="http://away")))
    assert blocked(tasks[-1]) == "storing it waits for its store: no answer in 60 s"
    scene.steps()
    assert (scene.tried, scene.kept[-1]) == (["t0"], "late")
    scene.pauses_end()
    scene.steps()
    assert len(scene.tried) == 2
    scene.refusals.clear()
    scene.pauses_end()
    scene.steps()
    scene.pauses_end()
    scene.steps()
    assert sorted(scene.done) == ["late", "t0", "t1", "t2", "t3"]
    assert [task.blocked for task in tasks] == [None] * 5


def test_a_task_that_never_trained_counts_the_tries_of_those_that_want_the_same_store() -> None:
    scene = Scene(refusals={"http://away": AWAY})
    for number in range(10):
        scene.begin(run(f"t{number}", endpoint="http://away"), tries=FEW)
    for _ in range(FEW + 1):
        scene.steps()
        scene.pauses_end()
    assert len(scene.lost) == 10
    assert len(scene.tried) < 10 + FEW
    assert set(map(str, scene.lost.values())) == {"no answer in 60 s"}


BUSY = StoreBusy("the hub answered 429: it requests a pause of 200 s", 200.0)


def test_a_busy_store_fails_no_task_and_is_asked_when_it_wants_to_be() -> None:
    task, rested, found, lost = run(), list[float](), list[str](), list[Exception]()

    def work() -> str:
        if len(rested) < 10:
            raise BUSY
        return "rows"

    def pause(seconds: float) -> None:
        rested.append(seconds)
        assert task.blocked is not None
        assert task.blocked.reason is FailureReason.STORAGE_UNREACHABLE
        assert task.blocked.message == f"fetching its rows waits for its store: {BUSY}"

    retrier(after(pause)).begin(
        inline_pool(), Attempt(task, "fetching its rows", work, found.append, lost.append, tries=FEW)
    )
    assert (rested, found, lost, task.blocked) == ([200.0] * 10, ["rows"], [], None)


def test_others_who_wait_for_a_busy_store_do_not_ask_it_and_are_not_lost() -> None:
    put_off: list[float] = []
    scene = Scene(most=3, refusals={"http://away": BUSY})
    scene.retrier = retrier(lambda seconds, call: (put_off.append(seconds), scene.put_off.append(call))[0])
    tasks = [
        scene.begin(run(f"t{number}", endpoint="http://away"), tries=2, keep=None) for number in range(4)
    ]
    for _ in range(5):
        scene.steps()
        assert {blocked(task).rpartition(": ")[2] for task in tasks} == {str(BUSY).rpartition(": ")[2]}
        scene.pauses_end()
    assert set(put_off) == {200.0}
    assert len(scene.tried) <= 6, "one asks for all of them"
    assert scene.lost == {}
    scene.refusals.clear()
    for _ in range(3):
        scene.steps()
        scene.pauses_end()
    assert sorted(scene.done) == ["t0", "t1", "t2", "t3"]
    assert [task.blocked for task in tasks] == [None] * 4


def test_what_is_cleaned_up_is_tried_once_though_nobody_wants_the_task() -> None:
    scene = Scene(refusals={"http://away": AWAY})
    for name, endpoint in (("here", "http://here"), ("away", "http://away")):
        task = run(name, endpoint=endpoint)
        task.withdrawn = True
        scene.begin(task, tries=1, cleans=True)
    scene.steps()
    assert (scene.done, scene.lost) == (["here"], {"away": AWAY})
    assert scene.put_off == []


def test_new_keys_are_tried_at_once_and_a_deleted_task_waits_no_longer() -> None:
    scene = Scene(most=3, refusals={"http://away": AWAY})
    tasks = [scene.begin(run(f"t{number}", endpoint="http://away")) for number in range(3)]
    scene.steps()
    mended = StorageAccess.model_validate({"endpoint": "http://here", "accessKey": "new"})
    for task in tasks[:2]:  # one rests after its own failure, the other was never tried
        task.plan = task.plan.model_copy(update={"storage": mended})
    tasks[2].withdrawn = True
    scene.retrier.look_again({"n-t0", "n-t1", "n-t2"})
    scene.steps()
    assert sorted(scene.done) == ["t0", "t1"]
    assert isinstance(scene.lost["t2"], Withdrawn)
    assert [task.blocked for task in tasks[:2]] == [None, None]


def test_what_fails_in_its_end_gives_its_thread_back() -> None:
    scene = Scene(most=1)

    def done(_: object) -> None:
        raise RuntimeError("a full disk, perhaps")

    task = run("bad")
    scene.retrier.begin(scene.pool, Attempt(task, "x", work=lambda: None, done=done, lost=pytest.fail))
    with pytest.raises(RuntimeError):
        scene.step()
    scene.begin(run("well"))
    scene.steps()
    assert scene.done == ["well"]


def test_a_store_that_answers_no_is_not_silent() -> None:
    scene = Scene(refusals={"http://here": AccessRefused("no")})
    for number in range(20):
        scene.begin(run(f"t{number}", endpoint="http://here"))
    scene.steps()
    assert len(scene.tried) == 20, "each is told at once"
    assert scene.kept == []
