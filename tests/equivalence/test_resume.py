"""A task that was interrupted ends as if it had not been: bit for bit where its microbatches are the same, else to 1e-6.

Everything is real but the wires and the store: dispatcher, loops, engines, checkpoints. Dropout, accumulation, warm-up with
cosine decay and weight decay are on, for each of them has a state or a place that a resume could miss.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from mlora_worker.frozen.four_bits import nf4
from mlora_worker.frozen.int8 import int8
from mlora_worker.frozen.linear import Freeze
from mlora_worker.frozen.plain import PlainWeight
from mlora_worker.protocol import FailureReason, LoRAConfig, Schedule, TaskPhase, Training
from mlora_worker.storage.artifacts.checkpoint import newest_progress, newest_state, write_checkpoint
from mlora_worker.storage.artifacts.task_state import CheckpointMismatch
from mlora_worker.storage.errors import AccessRefused, StoreUnreachable
from mlora_worker.stream.items import Checkpoint, Load, Train, Unload
from tests.equivalence.tasks import Base, Row, Task, engines_of, largest_difference
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.threaded import Crashed, ThreadedPipeline

STEPS = 20
Script = Callable[[ThreadedPipeline], None]


@pytest.fixture
def subject(rows: Callable[..., list[Row]]) -> Task:
    lora = LoRAConfig(
        rank=8, alpha=16, dropout=0.2, target_modules=("q_proj", "v_proj", "up_proj", "down_proj")
    )
    training = Training(
        batch_size=2, gradient_accumulation_steps=2, learning_rate=3e-3, schedule=Schedule.COSINE, warmup_steps=4,
        weight_decay=0.1, max_grad_norm=0.5, seed=11, checkpoint_every_steps=5,
    )  # fmt: skip
    return Task("subject", lora, training, rows(22, 1), STEPS)


@pytest.fixture
def neighbour(rows: Callable[..., list[Row]]) -> Task:
    lora = LoRAConfig(rank=3, alpha=7, dropout=0.1, target_modules=("q_proj", "o_proj"))
    training = Training(batch_size=3, learning_rate=2e-3, seed=5, checkpoint_every_steps=5)
    return Task("neighbour", lora, training, rows(30, 2), STEPS + 10)


def play(
    base: Base,
    stages: int,
    tasks: Sequence[Task],
    *,
    store: MemoryStore | None = None,
    kept: Path | None = None,
    script: Script | None = None,
    dtype: torch.dtype = torch.float32,
    freeze: Freeze = PlainWeight,
) -> ThreadedPipeline:
    engines = engines_of(base, stages, dtype=dtype, freeze=freeze)
    runs = {task.name: task.prepared() for task in tasks}
    return ThreadedPipeline(engines, runs, budget=10_000, store=store, kept=kept, script=script).run(20)


def whole(pipeline: ThreadedPipeline, *tasks: Task) -> ThreadedPipeline:
    assert pipeline.error is None
    for task in tasks:
        assert pipeline.tasks[task.name].phase is TaskPhase.SUCCEEDED, pipeline.tasks[task.name].failure
    return pipeline


def crash_at(step: int, task: str = "subject", saved: int = 0) -> Script:
    """Once ``task`` has done ``step`` steps, and its checkpoint of step ``saved`` is written."""

    def script(pipeline: ThreadedPipeline) -> None:
        run = pipeline.tasks[task]
        if run.progress.step >= step and run.checkpoint.stored_step >= saved:
            pipeline.crash()

    return script


def assert_bit_identical(found: ThreadedPipeline, wanted: ThreadedPipeline, task: str) -> None:
    for step, loss in found.losses[task].items():
        assert loss == wanted.losses[task][step], f"step {step}"
    assert found.adapters[task].keys() == wanted.adapters[task].keys()
    for name, tensor in wanted.adapters[task].items():
        assert torch.equal(found.adapters[task][name], tensor), name


def assert_equal(found: ThreadedPipeline, wanted: ThreadedPipeline, task: str) -> None:
    for step, loss in found.losses[task].items():
        assert loss == pytest.approx(wanted.losses[task][step], rel=1e-6), f"step {step}"
    assert largest_difference(found.adapters[task], wanted.adapters[task]) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stages", [1, 2])
def test_a_task_goes_on_after_a_crash_from_its_newest_checkpoint_bit_for_bit(
    base: Base, subject: Task, stages: int, dtype: torch.dtype
) -> None:
    undisturbed = whole(play(base, stages, [subject], dtype=dtype), subject)
    store = MemoryStore()
    first = play(base, stages, [subject], store=store, script=crash_at(12, saved=10), dtype=dtype)
    assert isinstance(first.error, Crashed)
    second = whole(play(base, stages, [subject], store=store, dtype=dtype), subject)
    assert second.tasks["subject"].checkpoint.resumed_step == 10
    assert min(second.losses["subject"]) in (10, 11), "the newest checkpoint, and no step before it again"
    assert_bit_identical(second, undisturbed, "subject")


QUANTISED = pytest.mark.parametrize("freeze", [partial(nf4, double=True), int8], ids=["nf4", "int8"])


@QUANTISED
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_task_on_a_quantised_base_goes_on_as_on_a_plain_one(
    base: Base, subject: Task, stages: int, freeze: Freeze
) -> None:
    undisturbed = whole(play(base, stages, [subject], freeze=freeze), subject)
    store = MemoryStore()
    first = play(base, stages, [subject], store=store, script=crash_at(12, saved=10), freeze=freeze)
    assert isinstance(first.error, Crashed)
    second = whole(play(base, stages, [subject], store=store, freeze=freeze), subject)
    assert second.tasks["subject"].checkpoint.resumed_step == 10
    assert_bit_identical(second, undisturbed, "subject")


def test_tasks_that_share_microbatches_go_on_together_bit_for_bit(
    base: Base, subject: Task, neighbour: Task
) -> None:
    """Both stand at step 10 again, so every microbatch after it is the same."""
    tasks = [subject, neighbour]
    undisturbed = whole(play(base, 1, tasks), *tasks)
    store = MemoryStore()

    def script(pipeline: ThreadedPipeline) -> None:
        if all(
            run.checkpoint.stored_step == 10 and run.progress.step >= 11 for run in pipeline.tasks.values()
        ):
            pipeline.crash()

    play(base, 1, tasks, store=store, script=script)
    second = whole(play(base, 1, tasks, store=store), *tasks)
    for task in tasks:
        assert second.tasks[task.name].checkpoint.resumed_step == 10
        assert_bit_identical(second, undisturbed, task.name)


@pytest.mark.parametrize("stages", [1, 3])
def test_a_task_goes_on_with_another_number_of_stages(
    base: Base, subject: Task, neighbour: Task, stages: int
) -> None:
    tasks = [subject, neighbour]
    undisturbed = whole(play(base, 2, tasks), *tasks)
    store = MemoryStore()
    play(base, 2, tasks, store=store, script=crash_at(12, saved=10))
    second = whole(play(base, stages, tasks, store=store), *tasks)
    assert second.tasks["subject"].checkpoint.resumed_step == 10
    for task in tasks:
        assert_equal(second, undisturbed, task.name)


def test_a_crash_at_every_few_steps_changes_nothing(base: Base, subject: Task) -> None:
    undisturbed = whole(play(base, 2, [subject]), subject)
    store = MemoryStore()
    for step in (6, 11, 17):
        play(base, 2, [subject], store=store, script=crash_at(step, saved=step // 5 * 5))
    last = whole(play(base, 2, [subject], store=store), subject)
    assert last.tasks["subject"].checkpoint.resumed_step == 15
    assert_bit_identical(last, undisturbed, "subject")


def preempt_between(step: int, until: Callable[[ThreadedPipeline], bool], *, forget: bool = False) -> Script:
    """``subject`` loses its place after ``step`` steps, and gets it back once it is safe and ``until`` holds."""

    sent_out: list[int] = []

    def script(pipeline: ThreadedPipeline) -> None:
        run = pipeline.tasks["subject"]
        if step <= run.progress.step and not sent_out:
            sent_out.append(run.progress.step)
            run.plan = run.plan.model_copy(update={"admitted": False})
        elif run.phase is TaskPhase.PREEMPTED and not run.plan.admitted and until(pipeline):
            if forget:
                run.checkpoint = run.checkpoint.released()
            run.plan = run.plan.model_copy(update={"admitted": True})

    return script


@pytest.mark.parametrize("forget", [False, True], ids=["from memory", "from the store"])
def test_a_preempted_task_comes_back_bit_for_bit(base: Base, subject: Task, forget: bool) -> None:
    undisturbed = whole(play(base, 2, [subject]), subject)
    found = whole(play(base, 2, [subject], script=preempt_between(7, lambda _: True, forget=forget)), subject)
    assert [type(item) for item in found.items if not isinstance(item, Train)][1:5] == [
        Checkpoint, Checkpoint, Unload, Load,
    ]  # fmt: skip
    assert found.tasks["subject"].checkpoint.resumed_step == 7
    assert sorted(found.losses["subject"]) == list(range(1, STEPS + 1))
    assert_bit_identical(found, undisturbed, "subject")
    reads = [uri for action, uri in found.store.calls if action == "read" and uri.endswith(".safetensors")]
    assert bool(reads) is forget


@QUANTISED
@pytest.mark.parametrize("forget", [False, True], ids=["from memory", "from the store"])
def test_a_preempted_task_on_a_quantised_base_comes_back_bit_for_bit_on_three_stages(
    base: Base, subject: Task, forget: bool, freeze: Freeze
) -> None:
    undisturbed = whole(play(base, 3, [subject], freeze=freeze), subject)
    script = preempt_between(7, lambda _: True, forget=forget)
    found = whole(play(base, 3, [subject], script=script, freeze=freeze), subject)
    assert found.tasks["subject"].checkpoint.resumed_step == 7
    assert_bit_identical(found, undisturbed, "subject")


@pytest.mark.parametrize("stages", [1, 2])
def test_neighbours_of_a_preempted_task_never_wait_and_end_the_same(
    base: Base, subject: Task, neighbour: Task, stages: int
) -> None:
    tasks = [subject, neighbour]
    undisturbed = whole(play(base, stages, tasks), *tasks)
    left: list[int] = []

    def until(pipeline: ThreadedPipeline) -> bool:
        left.append(pipeline.tasks["neighbour"].progress.step)
        return left[-1] >= left[0] + 5

    found = whole(play(base, stages, tasks, script=preempt_between(7, until)), *tasks)
    for task in tasks:
        assert_equal(found, undisturbed, task.name)
    kinds = [item for item in found.items if not isinstance(item, Train | Checkpoint)]
    assert [type(item) for item in kinds[:4]] == [Load, Load, Unload, Load]


def test_a_task_is_not_called_preempted_before_its_checkpoint_is_written_and_nothing_is_lost_meanwhile(
    base: Base, subject: Task
) -> None:
    undisturbed = whole(play(base, 2, [subject]), subject)
    refusals, preempt = 3, preempt_between(7, lambda _: True)
    store = MemoryStore()
    seen: list[tuple[TaskPhase, bool, int]] = []

    def refuse(action: str, uri: str) -> None:
        nonlocal refusals
        if action == "write" and "step-7" in uri and refusals:
            refusals -= 1
            raise AccessRefused("the keys were exchanged")

    def script(pipeline: ThreadedPipeline) -> None:
        run = pipeline.tasks["subject"]
        if run.blocked is not None:
            assert run.blocked.reason is FailureReason.ACCESS_DENIED
            assert "the keys were exchanged" in run.blocked.message
        if not run.in_stream and run.progress.step == 7:
            seen.append((run.phase, run.blocked is not None, run.checkpoint.stored_step))
        preempt(pipeline)

    store.on_call = refuse
    found = whole(play(base, 2, [subject], store=store, script=script), subject)
    assert {phase for phase, blocked, _ in seen if blocked} == {TaskPhase.TRAINING}
    assert {stored for phase, _, stored in seen if phase is TaskPhase.PREEMPTED} == {7}
    assert found.tasks["subject"].blocked is None
    assert_bit_identical(found, undisturbed, "subject")


def refuse_after(store: MemoryStore, step: int) -> None:
    """``store`` takes no checkpoint of a later step than ``step``."""

    def refuse(action: str, uri: str) -> None:
        found = re.search(r"/step-(\d+)/", uri)
        if action == "write" and found is not None and int(found[1]) > step:
            raise StoreUnreachable("the store is away")

    store.on_call = refuse


def crash_when_blocked(step: int) -> Script:
    """Once the store has refused the checkpoint of ``step``."""

    def script(pipeline: ThreadedPipeline) -> None:
        run = pipeline.tasks["subject"]
        if run.blocked is not None and run.checkpoint.taken_step >= step:
            pipeline.crash()

    return script


@pytest.mark.parametrize("volume", ["outlived the crash", "is gone, too"])
def test_a_checkpoint_that_the_store_refused_counts_if_the_volume_outlived_the_crash(
    base: Base, subject: Task, tmp_path: Path, volume: str
) -> None:
    undisturbed = whole(play(base, 2, [subject]), subject)
    store, kept = MemoryStore(), tmp_path / "kept"
    refuse_after(store, 5)
    first = play(base, 2, [subject], store=store, kept=kept, script=crash_when_blocked(10))
    assert isinstance(first.error, Crashed)
    assert newest(store) == 5
    store.on_call = None
    second = whole(
        play(base, 2, [subject], store=store, kept=kept if volume.startswith("out") else tmp_path / "new"),
        subject,
    )
    assert second.tasks["subject"].checkpoint.resumed_step == (10 if volume.startswith("out") else 5)
    assert_bit_identical(second, undisturbed, "subject")
    assert not volume.startswith("out") or not list(kept.rglob("*.safetensors")), "the store has newer ones"


def newest(store: MemoryStore) -> int:
    found = newest_progress(store, "s3://checkpoints/subject")
    return found.step if found is not None else 0


def test_a_kept_checkpoint_is_brought_to_the_store_before_its_task_counts_as_preempted(
    base: Base, subject: Task, tmp_path: Path
) -> None:
    """It is taken up and sent out again without a step: what the store refuses still is on the volume alone."""
    store, kept = MemoryStore(), tmp_path / "kept"
    refuse_after(store, 5)
    play(base, 2, [subject], store=store, kept=kept, script=crash_when_blocked(10))
    seen: list[tuple[TaskPhase, int]] = []

    def script(pipeline: ThreadedPipeline) -> None:
        run = pipeline.tasks["subject"]
        if run.checkpoint.resumed_step is not None and run.progress.step == 10 and not run.in_stream:
            seen.append((run.phase, run.checkpoint.stored_step))
            store.on_call = None
        if run.checkpoint.resumed_step is not None:
            out = any(phase is TaskPhase.PREEMPTED for phase, _ in seen)
            run.plan = run.plan.model_copy(update={"admitted": out})

    second = whole(play(base, 2, [subject], store=store, kept=kept, script=script), subject)
    assert seen[0] == (TaskPhase.TRAINING, 5)
    assert {stored for phase, stored in seen if phase is TaskPhase.PREEMPTED} == {10}
    assert_bit_identical(second, whole(play(base, 2, [subject]), subject), "subject")


def test_a_kept_checkpoint_of_other_rows_is_refused(base: Base, subject: Task, tmp_path: Path) -> None:
    store, kept = MemoryStore(), tmp_path / "kept"
    refuse_after(store, 0)
    play(base, 2, [subject], store=store, kept=kept, script=crash_when_blocked(5))
    runs = {"subject": subject.prepared()}
    prepared = runs["subject"].prepared
    assert prepared is not None
    prepared.fingerprint["dataset.sha256"] = "other"  # type: ignore[index]
    with pytest.raises(
        CheckpointMismatch, match=r"volume was written with dataset\.sha256 none, the task has other"
    ):
        ThreadedPipeline(engines_of(base, 2), runs, store=store, kept=kept).run()


def test_a_task_that_gets_its_place_back_before_its_checkpoint_is_written_goes_on_from_memory(
    base: Base, subject: Task
) -> None:
    undisturbed = whole(play(base, 2, [subject]), subject)
    store, resumed = MemoryStore(), threading.Event()

    def script(pipeline: ThreadedPipeline) -> None:
        run = pipeline.tasks["subject"]
        out = (
            run.progress.step == 7
            and run.checkpoint.resumed_step is None
            and (run.in_stream or run.checkpoint.snapshot is not None)
        )
        run.plan = run.plan.model_copy(update={"admitted": not out})
        if run.checkpoint.resumed_step is not None:
            resumed.set()

    def refuse(action: str, uri: str) -> None:
        if action == "write" and "step-7/" in uri and not resumed.wait(10):
            raise AssertionError("it waits for the store")

    store.on_call = refuse
    found = whole(play(base, 2, [subject], store=store, script=script), subject)
    assert found.tasks["subject"].checkpoint.resumed_step == 7
    assert_bit_identical(found, undisturbed, "subject")


def test_winding_down_keeps_what_every_task_has_done_and_begins_no_step(
    base: Base, subject: Task, neighbour: Task
) -> None:
    tasks = [subject, neighbour]
    undisturbed = whole(play(base, 2, tasks), *tasks)
    store = MemoryStore()

    def script(pipeline: ThreadedPipeline) -> None:
        if pipeline.tasks["subject"].progress.step == 8 and not pipeline.winding_down:
            pipeline.wind_down()

    first = play(base, 2, tasks, store=store, script=script)
    assert first.error is None
    done = {task.name: first.tasks[task.name].progress.step for task in tasks}
    assert done["subject"] <= 9
    assert {name: run.checkpoint.stored_step for name, run in first.tasks.items()} == done
    second = whole(play(base, 2, tasks, store=store), *tasks)
    assert {name: run.checkpoint.resumed_step for name, run in second.tasks.items()} == done
    for task in tasks:
        assert_equal(second, undisturbed, task.name)


def test_a_checkpoint_with_other_settings_is_refused_and_names_the_field(
    base: Base, subject: Task, neighbour: Task
) -> None:
    store = MemoryStore()
    tasks = [subject, neighbour]
    play(base, 2, tasks, store=store, script=crash_at(12, saved=10))
    runs = {task.name: task.prepared() for task in tasks}
    prepared = runs["subject"].prepared
    assert prepared is not None
    pipeline = ThreadedPipeline(engines_of(base, 2), runs, store=store)
    prepared.fingerprint["training.learningRate"] = 1.0  # type: ignore[index]
    with pytest.raises(Exception, match=r"training\.learningRate none, the task has 1\.0"):
        pipeline.run()


def test_a_checkpoint_whose_history_is_damaged_fails_its_task_alone(
    base: Base, subject: Task, neighbour: Task
) -> None:
    """Its files are whole, and where they lie its owner may write: it must not end the rank that reads it."""
    store = MemoryStore()
    play(base, 2, [subject, neighbour], store=store, script=crash_at(12, saved=10))
    state = newest_state(store, "s3://checkpoints/subject")
    assert state is not None
    write_checkpoint(store, "s3://checkpoints/subject", replace(state, history=b"no json\n"))
    second = play(base, 2, [subject, neighbour], store=store)
    assert second.error is None
    assert second.tasks["subject"].phase is TaskPhase.FAILED
    assert second.tasks["neighbour"].phase is TaskPhase.SUCCEEDED


def test_a_stage_at_another_step_makes_no_checkpoint(base: Base, subject: Task) -> None:
    """If a stage had missed an update, its part must not be mixed with the others'."""
    engines = engines_of(base, 2)
    pipeline = ThreadedPipeline(engines, {"subject": subject.prepared()})
    apply, calls = engines[1].apply, []

    def forgetful(task: str, update: object) -> None:
        calls.append(update)
        if len(calls) != 3:
            apply(task, update)  # type: ignore[arg-type]

    engines[1].apply = forgetful  # type: ignore[method-assign]
    pipeline.run()
    assert "stage 1 has applied 4 updates" in str(pipeline.error)
    assert not pipeline.store.objects
