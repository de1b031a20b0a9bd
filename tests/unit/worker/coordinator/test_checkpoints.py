"""Checkpoints that a store refuses: later ones are taken all the same, and the newest is what it gets in the end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch

from mlora_worker.coordinator.checkpoints import KEPT_BYTES, Checkpoints
from mlora_worker.coordinator.patience import Patience
from mlora_worker.coordinator.tasks import PreparedTask, Snapshot, TaskRun
from mlora_worker.data.order import StepPlan
from mlora_worker.pipeline.engine import StageState
from mlora_worker.protocol import (
    DataCounts,
    Dataset,
    LoRAConfig,
    StageReport,
    TaskPhase,
    TaskPlan,
    Training,
)
from mlora_worker.storage.checkpoint import TaskState, write_checkpoint
from mlora_worker.storage.errors import AccessRefused
from mlora_worker.storage.kept import KeptWork
from mlora_worker.storage.store import Store
from mlora_worker.stream.planner import load_of
from tests.fixtures.inline import inline_lane
from tests.fixtures.memory_store import MemoryStore

PLACE = "s3://b/p/checkpoints"
Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def training_task() -> TaskRun:
    training = Training(max_steps=100, checkpoint_every_steps=2, batch_size=1)
    plan = TaskPlan(
        uid="a", namespace="n", name="a", base_model="m", lora=LoRAConfig(), dataset=Dataset(inline="{}"),
        training=training, output_uri="s3://b/p", admitted=True,
    )  # fmt: skip
    task = TaskRun(plan, phase=TaskPhase.TRAINING, in_stream=True)
    steps, counts = StepPlan(4, training), DataCounts(rows=4, used=4)
    task.prepared = PreparedTask([], counts, steps, ("q_proj",), load_of([4], 1))
    return task


class Play:
    """One stage, a store that refuses as long as ``refuses``, and pauses that end when ``pauses_end`` is called."""

    def __init__(self, kept: Path, kept_bytes: int = KEPT_BYTES) -> None:
        self.task, self.store, self.refuses = training_task(), MemoryStore(self._answer), True
        self.put_off: list[Callable[[], None]] = []
        changed = threading.Condition()
        stage = StageReport(
            stage=0, first_layer=0, last_layer=0, device="cpu", resident_bytes=0, capacity_bytes=0
        )
        self.kept = KeptWork(kept)
        self.checkpoints = Checkpoints(
            stages=[stage],
            tasks={"a": self.task},
            open_place=lambda _: (cast(Store, self.store), PLACE),
            lane=inline_lane(),
            patience=Patience(
                changed=changed, on_change=lambda: None, later=lambda _, call: self.put_off.append(call)
            ),
            changed=changed,
            on_change=lambda: None,
            kept=self.kept,
            kept_bytes=kept_bytes,
        )

    def _answer(self, action: str, _: str) -> None:
        if action == "write" and self.refuses:
            raise AccessRefused("unknown key")

    def train(self, steps: int) -> None:
        """A checkpoint is taken, and its part comes at once, wherever one is due."""
        for _ in range(steps):
            self.task.steps_done = self.task.updates = self.task.steps_done + 1
            if self.task.checkpoint_is_due:
                number = self.task.steps_done
                self.task.snapshot, self.task.taken_step = Snapshot(number, self.task.progress()), number
                part = {f"parameters.{Q}": torch.full((2, 2), float(number))}
                self.checkpoints.heard(0, "a", number, StageState(number, part))

    def pauses_end(self) -> None:
        put_off, self.put_off = self.put_off, []
        for call in put_off:
            call()


def test_while_the_store_refuses_checkpoints_are_taken_on_and_the_newest_is_kept_and_written(
    tmp_path: Path,
) -> None:
    play = Play(tmp_path)
    play.train(2)
    assert play.task.blocked is not None
    play.train(4)
    assert play.task.state is not None
    assert play.task.state.progress.step == 6
    assert len(play.put_off) == 1, "there is one try of a task at a time"
    play.pauses_end()
    kept = play.kept.state("a", newer_than=0)
    assert kept is not None
    assert kept.progress.step == 6, "what a killed rank goes on from"
    play.refuses = False
    play.pauses_end()
    assert (play.task.stored_step, play.task.writing, play.task.blocked) == (6, False, None)
    assert {uri.split("/")[-2] for uri in play.store.objects} == {"step-6"}
    assert play.put_off == []


def test_a_task_that_a_plan_left_out_while_its_step_ran_has_its_checkpoint_written_when_it_is_back(
    tmp_path: Path,
) -> None:
    play = Play(tmp_path)
    play.train(2)
    play.task.withdrawn = True
    play.pauses_end()
    assert (play.task.writing, play.put_off) == (False, []), "nobody wants it"
    play.task.withdrawn = play.refuses = False
    play.checkpoints.come_back(play.task)
    assert play.task.stored_step == 2
    play.checkpoints.come_back(play.task)
    assert play.task.writing is False, "it is all in the store"


@pytest.mark.parametrize(("room", "held"), [(KEPT_BYTES, True), (0, False)])
def test_the_state_of_a_task_that_left_waits_in_memory_only_where_there_is_room(
    tmp_path: Path, room: int, held: bool
) -> None:
    play = Play(tmp_path, room)
    play.refuses, play.task.in_stream = False, False
    play.task.steps_done = play.task.updates = play.task.taken_step = 2
    play.task.snapshot = Snapshot(2, play.task.progress())
    play.checkpoints.heard(0, "a", 2, StageState(2, {f"parameters.{Q}": torch.ones(2, 2)}))
    assert play.task.phase is TaskPhase.PREEMPTED
    assert (play.task.state is not None) is held
    play.checkpoints.want(play.task)
    assert play.task.restoration is not None, "it comes back either way"


def test_while_one_is_in_writing_and_nothing_is_refused_the_next_one_waits() -> None:
    task = training_task()
    task.steps_done, task.writing = 2, True
    assert not task.checkpoint_is_due
    task.writing = False
    assert task.checkpoint_is_due


@pytest.mark.parametrize(
    "found", [2, 6], ids=["the newest one was damaged", "an earlier owner wrote one more"]
)
def test_a_task_that_found_another_checkpoint_than_was_known_is_preempted_once_it_has_left(
    tmp_path: Path, found: int
) -> None:
    play = Play(tmp_path)
    play.refuses, play.task.in_stream = False, False
    play.task.steps_done = play.task.taken_step = play.task.stored_step = 4  # as it was at the start
    tensors = {f"parameters.{Q}": torch.zeros(2, 2)}
    progress = play.task.progress().model_copy(update={"step": found})
    write_checkpoint(cast(Store, play.store), PLACE, TaskState(progress, tensors))
    play.checkpoints.want(play.task)
    assert play.task.restoration is not None
    play.task.resume(play.task.restoration)
    assert play.task.report().checkpoint_step == found
    play.task.step_out()
    assert play.task.phase is TaskPhase.PREEMPTED
