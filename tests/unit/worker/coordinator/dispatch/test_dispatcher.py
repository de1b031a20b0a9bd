"""The dispatcher played without an engine: which items a task's life is made of, and what rides with them."""

from __future__ import annotations

import math
from collections import UserDict
from collections.abc import ValuesView
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from mlora_worker.coordinator.dispatch.dispatcher import Dispatcher
from mlora_worker.coordinator.task.prepared import PreparedTask
from mlora_worker.coordinator.task.report import report_of
from mlora_worker.coordinator.task.run import TaskRun
from mlora_worker.data.prepare import TokenRow
from mlora_worker.data.training_rows.step_order import StepPlan
from mlora_worker.pipeline.faults import Fault, Phase
from mlora_worker.protocol import (
    DataCounts,
    Dataset,
    FailureReason,
    LoRAConfig,
    Schedule,
    TaskPhase,
    TaskPlan,
    Training,
)
from mlora_worker.stream.items import Checkpoint, Item, Load, Save, Train, Unload, Update
from mlora_worker.stream.planner import load_of, rows_per_step


def row(tokens: int, supervised: int) -> TokenRow:
    labels = np.full(tokens, -100, np.int32)
    labels[tokens - supervised :] = 1
    return TokenRow(ids=np.ones(tokens, np.int32), labels=labels)


def prepared_task(
    name: str, *, rows: list[TokenRow] | None = None, admitted: bool = True, **training: object
) -> TaskRun:
    rows = rows if rows is not None else [row(10, 4)] * 4
    settings = Training.model_validate(
        {"batch_size": 2, "max_steps": 2, "schedule": Schedule.CONSTANT, "learning_rate": 0.1, **training}
    )
    plan = TaskPlan(
        uid=name,
        namespace="n",
        name=name,
        admitted=admitted,
        base_model="m",
        lora=LoRAConfig(),
        dataset=Dataset(inline="{}"),
        training=settings,
        output_uri="s3://b/p",
    )
    task = TaskRun(plan, phase=TaskPhase.PREPARED)
    task.prepared = PreparedTask(
        rows,
        DataCounts(rows=len(rows), used=len(rows)),
        StepPlan(len(rows), settings),
        ("q_proj",),
        load_of([len(row.ids) for row in rows], rows_per_step(settings)),
    )
    return task


class Play:
    """Runs the stream with microbatches that come back at once, each segment with the given stats."""

    def __init__(
        self,
        *tasks: TaskRun,
        stages: int = 1,
        loss_sum: float = 8.0,
        squared_norm: float = 4.0,
        at_once: bool = False,
        **options: Any,
    ) -> None:
        """``at_once``: checkpoints are gathered and written as soon as they are taken."""
        self.at_once = at_once
        self.held = [0] * stages  # bytes that tasks hold which are out
        self.looks = 0  # times that it wants to be asked again
        self.taken: list[int] = []
        self.tasks = {task.uid: task for task in tasks}
        self.announced: list[Item] = []
        self.stats = [loss_sum, squared_norm]
        self.time = 0.0
        self.ended: list[Exception] = []
        self.dispatcher = Dispatcher(
            stages=stages,
            budget=1000,
            tasks=self.tasks,
            announce=lambda item, _: self.announced.append(item),
            **options,
            on_change=lambda: None,
            on_pipeline_fault=self.ended.append,
            clock=lambda: self.time,
            held=lambda: self.held,
            look_again=self.look,
        )

    def look(self) -> None:
        self.looks += 1

    def run(self, items: int = 100) -> list[Item]:
        """Until nothing is left to issue; gives what was issued."""
        first = len(self.announced)
        for _ in range(items):
            entry = self.dispatcher.supply()
            if entry is None:
                break
            if isinstance(entry.item, Train):
                self.time += 1.0
                stats = [
                    [self.stats[0], self.stats[1] if s.closes_step else 0.0, 0.0] for s in entry.item.segments
                ]
                self.dispatcher.returned(entry.item.number, torch.tensor(stats, dtype=torch.float64))
            elif isinstance(entry.item, Checkpoint) and self.at_once:
                task = self.tasks[entry.item.task]
                self.taken.append(task.progress.step)
                task.checkpoint = replace(task.checkpoint, stored_step=task.progress.step, snapshot=None)
        return self.announced[first:]


def kinds(items: list[Item]) -> list[str]:
    return [item.kind for item in items]


def test_a_life_is_load_train_save_unload() -> None:
    items = Play(prepared_task("a")).run()
    assert kinds(items) == ["load", "train", "train", "save", "unload"]
    assert [item.number for item in items] == [1, 2, 3, 4, 5]
    assert isinstance(items[0], Load)
    assert items[0].lora == LoRAConfig(), "each stage resolves the modules that it has"


def test_an_update_rides_with_the_next_item() -> None:
    play = Play(prepared_task("a", max_grad_norm=1.0), squared_norm=16.0)
    _, first, second, save, _ = play.run()
    assert isinstance(first, Train)
    assert isinstance(second, Train)
    assert isinstance(save, Save)
    assert first.segments[0].update is None
    clip = 1.0 / (4.0 + 1e-6)  # as torch.nn.utils.clip_grad_norm_ has it
    assert second.segments[0].update == Update(step=1, learning_rate=0.1, clip=clip)
    assert save.update == Update(step=2, learning_rate=0.1, clip=clip)


def test_clipping_is_off_at_zero_and_never_enlarges() -> None:
    for norm, maximum, clip in [(100.0, 0.0, 1.0), (0.01, 1.0, 1.0)]:
        items = Play(prepared_task("a", max_grad_norm=maximum), squared_norm=norm**2).run()
        assert isinstance(items[2], Train)
        update = items[2].segments[0].update
        assert update is not None
        assert update.clip == clip


def test_the_loss_is_the_mean_over_the_steps_supervised_tokens_however_it_was_cut() -> None:
    task = prepared_task("a", rows=[row(10, 1), row(10, 7)], max_steps=1)
    play = Play(task, stages=2, loss_sum=6.0)  # one group on two stages: two microbatches, 6 + 6
    trains = [item for item in play.run() if isinstance(item, Train)]
    assert len(trains) == 2
    assert {segment.weight for train in trains for segment in train.segments} == {1 / 8}
    assert task.progress.last is not None
    assert task.progress.last.loss == pytest.approx(12 / 8)


def test_a_step_without_supervised_tokens_adds_nothing_and_moves_nothing() -> None:
    task = prepared_task("a", rows=[row(10, 0), row(10, 0)], max_steps=1)
    *_, save, _ = Play(task, loss_sum=0.0, squared_norm=0.0).run()
    assert isinstance(save, Save)
    assert save.update is None
    assert task.progress.last is not None
    assert (task.progress.last.loss, task.progress.step) == (None, 1)


@pytest.mark.parametrize(
    ("loss", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (1.0, math.inf)]
)
def test_what_is_not_finite_fails_its_task_and_nothing_is_saved(loss: float, norm: float) -> None:
    task = prepared_task("a")
    items = Play(task, loss_sum=loss, squared_norm=norm).run()
    assert kinds(items) == ["load", "train", "unload"]
    assert task.phase is TaskPhase.FAILED
    assert task.failure is not None
    assert task.failure.reason is FailureReason.NON_FINITE_LOSS
    assert "step 1 of 2" in task.failure.message


def test_tasks_share_microbatches_on_one_stage() -> None:
    items = Play(prepared_task("a"), prepared_task("b", max_steps=1)).run()
    assert kinds(items) == ["load", "load", "train", "save", "unload", "train", "save", "unload"]
    trains = [item for item in items if isinstance(item, Train)]
    assert [[segment.task for segment in train.segments] for train in trains] == [["a", "b"], ["a"]]


def test_a_task_that_is_not_admitted_waits_and_one_that_lost_its_place_leaves_behind_a_checkpoint() -> None:
    task = prepared_task("a", admitted=False, max_steps=5)
    play = Play(task)
    assert play.run() == []
    task.plan = task.plan.model_copy(update={"admitted": True})
    assert kinds(play.run(items=3)) == ["load", "train", "train"]
    task.plan = task.plan.model_copy(update={"admitted": False})
    checkpoint, unload = play.run()
    assert isinstance(checkpoint, Checkpoint)
    assert isinstance(unload, Unload)
    assert checkpoint.update is not None
    assert checkpoint.update.step == 2, "what it holds is what two steps made"
    assert task.checkpoint.snapshot is not None
    assert (task.checkpoint.snapshot.number, task.checkpoint.snapshot.progress.step) == (checkpoint.number, 2)
    assert task.phase is TaskPhase.TRAINING, "until the checkpoint is in the store"
    task.plan = task.plan.model_copy(update={"admitted": True})
    assert play.run() == [], "nor is it loaded before its state is here"


def test_a_task_that_has_made_no_step_leaves_without_a_checkpoint_and_begins_anew() -> None:
    task = prepared_task("a")
    play = Play(task)
    assert kinds(play.run(items=1)) == ["load"]
    task.plan = task.plan.model_copy(update={"admitted": False})
    assert kinds(play.run()) == ["unload"]
    assert task.phase is TaskPhase.PREPARED


def test_what_has_done_all_its_steps_is_saved_also_when_it_lost_its_place() -> None:
    task = prepared_task("a", max_steps=2)
    play = Play(task)
    play.run(items=3)
    task.plan = task.plan.model_copy(update={"admitted": False})
    assert kinds(play.run()) == ["save", "unload"]


@pytest.mark.parametrize(("every", "taken"), [(0, []), (2, [2, 4, 6]), (3, [3, 6]), (50, [])])
def test_checkpoints_are_taken_at_multiples_of_the_interval_but_not_at_the_end(
    every: int, taken: list[int]
) -> None:
    task = prepared_task("a", max_steps=7, checkpoint_every_steps=every)
    play = Play(task, at_once=True)
    play.run()
    assert play.taken == taken


def test_there_is_one_checkpoint_of_a_task_at_a_time() -> None:
    task = prepared_task("a", max_steps=9, checkpoint_every_steps=2)
    items = Play(task).run()
    assert kinds(items).count("checkpoint") == 1, "the parts of the first one never came"
    assert kinds(items)[-2:] == ["save", "unload"]


def test_winding_down_ends_the_stream_behind_the_checkpoints() -> None:
    a, b = prepared_task("a", max_steps=9), prepared_task("b", max_steps=9)
    waits = prepared_task("c", admitted=False)
    play = Play(a, b, waits, at_once=True)
    play.run(items=4)
    waits.plan = waits.plan.model_copy(update={"admitted": True})
    play.dispatcher.wind_down()
    assert kinds(play.run()) == ["checkpoint", "checkpoint", "stop"]
    assert play.dispatcher.stopped
    assert play.run() == []


def test_a_withdrawn_task_leaves_once_its_step_is_back() -> None:
    task = prepared_task("a", max_steps=5)
    play = Play(task)
    play.run(items=1)
    entry = play.dispatcher.supply()
    assert entry is not None
    assert isinstance(entry.item, Train)
    task.withdrawn = True
    assert play.dispatcher.supply() is None, "its step is in flight"
    play.dispatcher.returned(entry.item.number, torch.zeros(1, 3, dtype=torch.float64))
    left = play.dispatcher.supply()
    assert left is not None
    assert isinstance(left.item, Unload)


def test_tokens_per_second_is_over_the_time_from_load_to_the_last_returned_step() -> None:
    task = prepared_task("a", max_steps=2)
    Play(task).run()
    assert report_of(task).tokens_per_second == pytest.approx(40 / 2)


# --- faults ---------------------------------------------------------------------------------------------------------


def next_train(play: Play) -> Train:
    entry = play.dispatcher.supply()
    assert entry is not None
    assert isinstance(entry.item, Train)
    return entry.item


def come_back(play: Play, train: Train, faults: int = 0) -> None:
    stats = [[8.0, 4.0 if segment.closes_step else 0.0, faults] for segment in train.segments]
    play.dispatcher.returned(train.number, torch.tensor(stats, dtype=torch.float64))


def fault(number: int, phase: Phase = Phase.FORWARD, task: str | None = None, memory: bool = False) -> Fault:
    return Fault(
        stage=0, number=number, phase=phase, task=task, out_of_memory=memory, error="ValueError: odd"
    )


@pytest.mark.parametrize("told_late", [False, True])
def test_a_void_step_is_issued_again_alone_with_the_word_to_discard_and_without_the_update_again(
    told_late: bool,
) -> None:
    a, b = prepared_task("a", max_steps=3), prepared_task("b", max_steps=3)
    play = Play(a, b)
    play.run(items=3)
    shared = next_train(play)
    assert [segment.update is not None for segment in shared.segments] == [True, True]
    if not told_late:
        play.dispatcher.faulted(fault(shared.number))
    come_back(play, shared, faults=1)
    if told_late:
        assert play.dispatcher.supply() is None, "whose fault it is, is not known yet"
        play.dispatcher.faulted(fault(shared.number))
    for task in (a, b):
        again = next_train(play)
        assert play.dispatcher.supply() is None, "a trial has the pipeline for itself"
        [segment] = again.segments
        assert (segment.task, segment.step, segment.discard, segment.update) == (task.uid, 2, True, None)
        assert segment.lengths == shared.segments[0].lengths
        come_back(play, again)
        assert task.progress.step == 2
    together = next_train(play)
    assert [(s.task, s.step, s.discard) for s in together.segments] == [("a", 3, False), ("b", 3, False)]
    assert all(segment.update is not None and segment.update.step == 2 for segment in together.segments)


def test_what_a_void_step_brought_back_does_not_count() -> None:
    task = prepared_task("a", max_steps=1)
    play = Play(task)
    play.run(items=1)
    first = next_train(play)
    play.dispatcher.faulted(fault(first.number))
    play.dispatcher.returned(first.number, torch.tensor([[math.nan, math.nan, 1.0]], dtype=torch.float64))
    come_back(play, next_train(play))
    assert task.progress.last is not None
    assert task.progress.last.loss == pytest.approx(8.0 / 8)


def test_a_fault_that_names_its_task_fails_it_at_once_and_its_neighbour_repeats_the_step() -> None:
    bad, good = prepared_task("bad"), prepared_task("good")
    play = Play(bad, good)
    play.run(items=2)
    shared = next_train(play)
    play.dispatcher.faulted(fault(shared.number, Phase.UPDATE, "bad"))
    come_back(play, shared, faults=1)
    assert bad.failure is not None
    assert bad.failure.reason is FailureReason.INTERNAL_ERROR
    assert "in the optimizer step before step 1" in bad.failure.message
    assert kinds(play.run()) == ["unload", "train", "train", "save", "unload"]
    assert good.progress.step == 2


def test_a_task_that_is_alone_fails_for_want_of_memory_only_on_a_stage_that_was_emptied_before() -> None:
    task = prepared_task("a", max_steps=3)
    play = Play(task)
    play.run(items=1)
    alone = next_train(play)
    play.dispatcher.faulted(fault(alone.number, Phase.UPDATE, "a", memory=True))
    come_back(play, alone, faults=1)
    assert task.failure is None
    assert kinds(play.run(items=2)) == ["unload", "load"], "its stage gives back what the process has kept"
    play.dispatcher.faulted(fault(task.load_number, Phase.LOAD, "a", memory=True))
    assert task.failure is not None
    assert task.failure.reason is FailureReason.OUT_OF_MEMORY
    assert "stage 0 ran out of memory while its adapter was created" in task.failure.message
    assert not play.dispatcher.exhausted


def test_a_whole_step_between_two_lacks_of_memory_begins_the_count_anew() -> None:
    task = prepared_task("a", max_steps=9)
    play = Play(task)
    for _ in range(3):
        assert kinds(play.run(items=1)) == ["load"]
        play.dispatcher.faulted(fault(task.load_number, Phase.LOAD, "a", memory=True))
        assert kinds(play.run(items=2)) == ["unload", "load"]
        come_back(play, next_train(play))
        assert task.progress.step == 1
        task.restart()
        assert kinds(play.run(items=1)) == ["unload"]
    assert task.failure is None


def test_an_update_that_never_finds_memory_fails_its_task_although_the_step_before_it_comes_back() -> None:
    """The step was taken for a sign that memory suffices: the task went round for ever."""
    task = prepared_task("a", max_steps=3)
    play = Play(task)
    play.run(items=1)
    for _ in range(2):
        assert task.failure is None
        come_back(play, next_train(play))
        assert task.progress.step == 1
        second = next_train(play)
        play.dispatcher.faulted(fault(second.number, Phase.UPDATE, "a", memory=True))
        come_back(play, second, faults=1)
        assert task.failure is not None or kinds(play.run(items=2)) == ["unload", "load"]
    assert task.failure is not None
    assert task.failure.reason is FailureReason.OUT_OF_MEMORY


def test_rows_that_find_no_memory_alone_are_tried_once_more_on_an_emptied_stage() -> None:
    task = prepared_task("a", rows=[row(10, 4)], batch_size=1, max_steps=3)
    play = Play(task)
    play.run(items=1)
    for _ in range(2):  # the step, and its trial
        train = next_train(play)
        play.dispatcher.faulted(fault(train.number, memory=True))
        come_back(play, train, faults=1)
    assert task.failure is None
    assert kinds(play.run(items=2)) == ["unload", "load"]
    for _ in range(2):
        train = next_train(play)
        play.dispatcher.faulted(fault(train.number, memory=True))
        come_back(play, train, faults=1)
    assert task.failure is not None
    assert task.failure.reason is FailureReason.OUT_OF_MEMORY


def test_a_task_waits_while_tasks_that_are_out_hold_the_memory_that_it_lacks() -> None:
    task = prepared_task("a", max_steps=3)
    play = Play(task)
    play.held = [100]
    for held in (100, 60, 20):
        play.held = [held]
        assert kinds(play.run(items=1)) == ["load"]
        play.dispatcher.faulted(fault(task.load_number, Phase.LOAD, "a", memory=True))
        assert kinds(play.run(items=9)) == ["unload"], "it is not tried before something is free"
        assert (task.failure, report_of(task).crowded_out) == (None, True)
        looks = play.looks
        play.time += 5
        play.run()
        assert play.looks == looks + 1, "nobody may tell when it is free"
    play.held = [0]
    assert kinds(play.run()) == ["load", "train", "train", "train", "save", "unload"]
    assert not play.dispatcher.exhausted


def test_what_tasks_that_are_out_hold_is_not_held_against_those_that_are_there() -> None:
    a, b = prepared_task("a", max_steps=9), prepared_task("b", max_steps=9)
    play = Play(a, b)
    play.run(items=2)
    play.held = [100]
    play.dispatcher.faulted(fault(b.load_number, Phase.LOAD, "b", memory=True))
    assert not play.dispatcher.exhausted, "they may well fit together"
    play.run(items=2)
    assert not b.in_stream
    play.held = [0]
    play.dispatcher.faulted(fault(a.load_number, Phase.SAVE, "b"))
    a.withdrawn = True
    play.run(items=9)
    assert b.in_stream


@pytest.mark.parametrize("planned_anew", [False, True])
def test_who_left_for_want_of_memory_comes_back_once_another_has_left_or_the_operator_has_planned_anew(
    planned_anew: bool,
) -> None:
    tasks = [prepared_task(name, max_steps=9) for name in "abc"]
    play = Play(*tasks)
    play.run(items=3)
    newest = tasks[2]
    play.dispatcher.faulted(fault(newest.load_number, Phase.LOAD, newest.uid, memory=True))
    assert kinds(play.run(items=1)) == ["unload"]
    assert newest.failure is None
    assert [one.tasks for one in play.dispatcher.exhausted] == [("a", "b", "c")]
    play.run(items=2)
    assert not newest.in_stream, "as many are there as when it left"
    if planned_anew:
        newest.plan = newest.plan.model_copy(update={"admitted": False})
        play.run(items=1)
        newest.plan = newest.plan.model_copy(update={"admitted": True})
    else:
        tasks[0].withdrawn = True
    kinds_after = kinds(play.run(items=3))
    assert "load" in kinds_after
    assert newest.in_stream


def test_a_report_says_who_stays_out_for_want_of_memory_and_of_others_nothing() -> None:
    """A former operator takes no report with a field that it does not know, so the field is there only while it is so."""
    a, b = prepared_task("a", max_steps=9), prepared_task("b", max_steps=9)
    play = Play(a, b)
    play.run(items=2)
    play.dispatcher.faulted(fault(b.load_number, Phase.LOAD, "b", memory=True))
    told = [report_of(b).crowded_out]  # it is still in the stream
    play.run(items=1)
    told.append(report_of(b).crowded_out)
    assert told == [None, True]
    assert "crowdedOut" not in report_of(a).to_json()
    b.plan = b.plan.model_copy(update={"admitted": False})
    play.run(items=1)
    assert "crowdedOut" not in report_of(b).to_json()


def test_a_report_says_whom_only_the_store_keeps() -> None:
    """One that trains on while its checkpoint is refused is in the stages' memory; one that leaves, or is done, is not."""
    trains, leaves = prepared_task("trains", max_steps=9), prepared_task("leaves", max_steps=9)
    done = prepared_task("done", max_steps=1)
    tasks = (trains, leaves, done)
    play = Play(*tasks)
    play.run(items=5)
    for task in tasks:
        task.block(FailureReason.ACCESS_DENIED, "denied")
    leaves.plan = leaves.plan.model_copy(update={"admitted": False})
    play.run(items=6)
    assert [(task.phase.value, report_of(task).released) for task in tasks] == [
        ("Training", None),
        ("Training", True),
        ("Saving", True),
    ]
    assert "released" not in report_of(trains).to_json()
    done.blocked = None
    assert report_of(done).released is None


def test_a_fault_that_is_told_twice_sends_its_task_out_once() -> None:
    a, b = prepared_task("a", max_steps=5), prepared_task("b", max_steps=5)
    play = Play(a, b)
    play.run(items=2)
    told = fault(b.load_number, Phase.LOAD, "b", memory=True)
    play.dispatcher.faulted(told)
    play.dispatcher.faulted(told)
    play.run(items=1)
    play.dispatcher.faulted(told)
    assert len(play.dispatcher.exhausted) == 1
    assert b.phase is TaskPhase.PREPARED


def test_microbatches_and_tokens_count_when_they_are_back_and_whole() -> None:
    a, b = prepared_task("a", max_steps=3), prepared_task("b", max_steps=3)
    play = Play(a, b)
    play.run(items=2)
    shared = next_train(play)
    counted = [(play.dispatcher.microbatches, play.dispatcher.tokens)]
    play.dispatcher.faulted(fault(shared.number))
    come_back(play, shared, faults=1)
    counted.append((play.dispatcher.microbatches, play.dispatcher.tokens))
    again = next_train(play)
    come_back(play, again)
    assert counted == [(0, 0), (0, 0)]
    assert (play.dispatcher.microbatches, play.dispatcher.tokens) == (1, again.tokens)


@pytest.mark.parametrize("phase", [Phase.LOAD, Phase.SAVE])
def test_a_fault_of_a_load_or_save_fails_the_task_when_it_is_told(phase: Phase) -> None:
    task = prepared_task("a", max_steps=1)
    play = Play(task)
    items = play.run(items=1 if phase is Phase.LOAD else 3)
    play.dispatcher.faulted(fault(items[-1].number, phase, "a"))
    assert task.phase is TaskPhase.FAILED
    assert task.failure is not None
    assert "ValueError: odd" in task.failure.message
    assert kinds(play.run()) == ["unload"]


def test_a_fault_of_a_former_load_does_not_fail_the_task_that_came_back() -> None:
    task = prepared_task("a", max_steps=5)
    play = Play(task)
    [first] = play.run(items=1)
    task.plan = task.plan.model_copy(update={"admitted": False})
    play.run(items=1)
    task.plan = task.plan.model_copy(update={"admitted": True})
    play.run(items=1)
    play.dispatcher.faulted(fault(first.number, Phase.LOAD, "a"))
    assert task.phase is TaskPhase.TRAINING


def test_a_suspect_that_is_withdrawn_leaves_and_the_next_one_is_tried() -> None:
    a, b = prepared_task("a"), prepared_task("b")
    play = Play(a, b)
    play.run(items=2)
    shared = next_train(play)
    play.dispatcher.faulted(fault(shared.number))
    come_back(play, shared, faults=1)
    a.withdrawn = True
    assert kinds(play.run()) == ["unload", "train", "train", "save", "unload"]
    assert b.progress.step == 2


def fail_every_task(play: Play) -> Load:
    """Two tasks fail together, then each alone, in the same way; gives the load of the probe that is called then."""
    play.run(items=2)
    for _ in range(3):
        train = next_train(play)
        play.dispatcher.faulted(fault(train.number))
        come_back(play, train, faults=1)
    assert not play.ended, "nobody has shown yet that the pipeline is at fault"
    entry = play.dispatcher.supply()
    assert entry is not None
    assert isinstance(entry.item, Load)
    return entry.item


def test_rows_that_no_model_can_take_fail_their_tasks_and_not_the_pipeline() -> None:
    a, b = prepared_task("a"), prepared_task("b")
    play = Play(a, b)
    load = fail_every_task(play)
    assert load.lora.rank == 1
    probe = next_train(play)
    assert [(one.task, sum(one.lengths)) for one in probe.segments] == [(load.task, 8)]
    come_back(play, probe)
    assert [task.phase for task in (a, b)] == [TaskPhase.FAILED] * 2
    assert all(task.failure is not None and "ValueError: odd" in task.failure.message for task in (a, b))
    assert not play.ended
    left = play.run()
    assert sorted((item.kind, getattr(item, "task", "")) for item in left) == [
        ("unload", "a"), ("unload", "b"), ("unload", load.task),
    ]  # fmt: skip
    c = play.tasks["c"] = prepared_task("c")
    assert kinds(play.run()) == ["load", "train", "train", "save", "unload"]
    assert c.progress.step == 2


@pytest.mark.parametrize("whose", [None, "probe"], ids=["of the microbatch", "of its adapter"])
def test_an_error_that_every_task_meets_alone_ends_the_pipeline_and_fails_nobody(whose: str | None) -> None:
    a, b = prepared_task("a"), prepared_task("b")
    play = Play(a, b)
    fail_every_task(play)
    for _ in range(2):
        train = next_train(play)
        play.dispatcher.faulted(fault(train.number, task=whose))
        come_back(play, train, faults=1)
    assert [str(error) for error in play.ended] == ["every task fails in forward on stage 0: ValueError: odd"]
    assert [task.phase for task in (a, b)] == [TaskPhase.TRAINING] * 2


# --- thousands that wait --------------------------------------------------------------------------------------------


class Counted(UserDict[str, TaskRun]):
    """Counts how often all tasks are passed over."""

    passes = 0

    def values(self) -> ValuesView[TaskRun]:
        self.passes += 1
        return super().values()


def test_for_each_microbatch_those_that_wait_are_passed_over_once_at_most() -> None:
    inside = [prepared_task(name, max_steps=50) for name in ("a", "b")]
    play = Play(*inside, *(prepared_task(f"waits-{number}", admitted=False) for number in range(20)))
    tasks = play.dispatcher._tasks = play.dispatcher._inside._tasks = Counted(play.tasks)
    play.run(items=2)
    tasks.passes = 0
    assert kinds(play.run(items=10)) == ["train"] * 10, "and each comes back"
    assert tasks.passes <= 10


def test_a_report_is_made_anew_only_where_something_in_it_has_changed() -> None:
    task = prepared_task("a")
    first = report_of(task)
    assert report_of(task) is first
    task.block(FailureReason.ACCESS_DENIED, "no")
    blocked = report_of(task)
    assert (blocked.blocked, first.blocked) == (task.blocked, None)
    task.blocked = None
    assert report_of(task) == first
    Play(task).run()
    assert (report_of(task).step, report_of(task).phase) == (2, TaskPhase.SAVING)
