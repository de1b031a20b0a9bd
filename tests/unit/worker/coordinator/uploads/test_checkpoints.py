"""Checkpoints that a store refuses: later ones are taken all the same, and the newest is what it gets in the end."""

from __future__ import annotations

import gc
import hashlib
import json
import re
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch

from mlora_worker.coordinator.task.checkpoint_state import CheckpointState
from mlora_worker.coordinator.task.outcome import PendingCheckpoint
from mlora_worker.coordinator.task.prepared import PreparedTask
from mlora_worker.coordinator.task.progress import TrainingProgress
from mlora_worker.coordinator.task.report import report_of
from mlora_worker.coordinator.task.run import TaskRun
from mlora_worker.coordinator.uploads.checkpoints import KEPT_BYTES, CheckpointTransfer
from mlora_worker.coordinator.uploads.retrier import UploadRetrier
from mlora_worker.data.training_rows.step_order import StepPlan
from mlora_worker.pipeline.results import StageState
from mlora_worker.protocol import (
    DataCounts,
    Dataset,
    FailureReason,
    LoRAConfig,
    StageReport,
    TaskPhase,
    TaskPlan,
    Training,
)
from mlora_worker.storage.artifacts.aside import Aside
from mlora_worker.storage.artifacts.checkpoint import newest_state, write_checkpoint
from mlora_worker.storage.artifacts.local_spool import LocalSpool
from mlora_worker.storage.artifacts.task_state import PREFIXES, CheckpointMismatch, SavedProgress, TaskState
from mlora_worker.storage.errors import AccessRefused
from mlora_worker.storage.object_store.file_store import FileStore
from mlora_worker.storage.object_store.store import Store
from mlora_worker.stream.planner import load_of
from tests.fixtures.inline import inline_pool
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.process_memory import data_bytes

PLACE = "s3://b/p/checkpoints"
Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {prefix + Q: torch.full((2, 2), value) for prefix in PREFIXES}


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


def trained(steps: int) -> TrainingProgress:
    return TrainingProgress(steps, updates=steps)


class Play:
    """One stage, a store that refuses as long as ``refuses``, and pauses that end when ``pauses_end`` is called."""

    def __init__(self, kept: Path, kept_bytes: int = KEPT_BYTES) -> None:
        self.task, self.store, self.refuses = training_task(), MemoryStore(self._answer), True
        self.put_off: list[Callable[[], None]] = []
        changed = threading.Condition()
        stage = StageReport(
            stage=0, first_layer=0, last_layer=0, device="cpu", resident_bytes=0, capacity_bytes=0
        )
        self.kept = LocalSpool(kept)
        self.checkpoints = CheckpointTransfer(
            stages=[stage],
            tasks={"a": self.task},
            open_checkpoints=lambda _: (cast(Store, self.store), PLACE),
            pool=inline_pool(),
            retrier=UploadRetrier(
                changed=changed, on_change=lambda: None, later=lambda _, call: self.put_off.append(call)
            ),
            changed=changed,
            on_change=lambda: None,
            shapes_of=lambda _: {Q: (2, 2)},
            spool=self.kept,
            kept_bytes=kept_bytes,
        )

    def _answer(self, action: str, _: str) -> None:
        if action == "write" and self.refuses:
            raise AccessRefused("unknown key")

    def train(self, steps: int) -> None:
        """A checkpoint is taken, and its part comes at once, wherever one is due."""
        for _ in range(steps):
            number = self.task.progress.step + 1
            self.task.progress = trained(number)
            if self.task.checkpoint_is_due:
                snapshot = PendingCheckpoint(number, self.task.saved_progress())
                self.task.checkpoint = self.task.checkpoint.begun(snapshot)
                part = tensors(float(number))
                self.checkpoints.receive(0, "a", number, StageState(number, part))

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
    assert play.task.checkpoint.state is not None
    assert play.task.checkpoint.state.progress.step == 6
    assert len(play.put_off) == 1, "there is one try of a task at a time"
    play.pauses_end()
    kept = play.kept.state("a", newer_than=0)
    assert kept is not None
    assert kept.progress.step == 6, "what a killed rank goes on from"
    play.refuses = False
    play.pauses_end()
    assert (play.task.checkpoint.stored_step, play.task.writing, play.task.blocked) == (6, False, None)
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
    assert play.task.checkpoint.stored_step == 2
    play.checkpoints.come_back(play.task)
    assert play.task.writing is False, "it is all in the store"


@pytest.mark.parametrize(("room", "held"), [(KEPT_BYTES, True), (0, False)])
def test_the_state_of_a_task_that_left_waits_in_memory_only_where_there_is_room(
    tmp_path: Path, room: int, held: bool
) -> None:
    play = Play(tmp_path, room)
    play.refuses, play.task.in_stream = False, False
    play.task.progress = trained(2)
    play.task.checkpoint = CheckpointState().begun(PendingCheckpoint(2, play.task.saved_progress()))
    play.checkpoints.receive(0, "a", 2, StageState(2, tensors(1.0)))
    assert play.task.phase is TaskPhase.PREEMPTED
    assert (play.task.checkpoint.state is not None) is held
    play.checkpoints.want(play.task)
    assert play.task.checkpoint.restoration is not None, "it comes back either way"


def test_while_one_is_in_writing_and_nothing_is_refused_the_next_one_waits() -> None:
    task = training_task()
    task.progress, task.writing = trained(2), True
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
    play.task.progress = trained(4)
    play.task.checkpoint = CheckpointState(taken_step=4, stored_step=4)  # as it was at the start
    progress = play.task.saved_progress().model_copy(update={"step": found, "updates": found})
    write_checkpoint(cast(Store, play.store), PLACE, TaskState(progress, tensors(0.0)))
    play.checkpoints.want(play.task)
    assert play.task.checkpoint.restoration is not None
    play.task.resume(play.task.checkpoint.restoration)
    assert report_of(play.task).checkpoint_step == found
    play.task.step_out()
    assert play.task.phase is TaskPhase.PREEMPTED


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"updates": 16_777_217}, "updates is 16777217, step is 4"),
        ({"step": 6, "updates": 6}, "another step or task than its manifest"),
        ({"totalSteps": 101}, r"training\.totalSteps|totalSteps is 101"),
        ({"tokens": 10**400}, "a whole number of 401 digits"),
        ({"seconds": -1.0}, "seconds"),
    ],
)
def test_a_checkpoint_of_numbers_that_no_task_has_fails_that_task_before_anything_of_it_reaches_the_stream(
    tmp_path: Path, change: dict[str, object], told: str
) -> None:
    play = Play(tmp_path)
    play.refuses, play.task.in_stream = False, False
    play.task.progress, play.task.checkpoint = trained(4), CheckpointState(stored_step=4)
    assert play.task.prepared is not None
    facts = {"training.totalSteps": 100}
    play.task.prepared = replace(play.task.prepared, fingerprint=facts)
    write_checkpoint(cast(Store, play.store), PLACE, TaskState(play.task.saved_progress(), tensors(0.0)))
    forge(play.store, change)
    with pytest.raises(CheckpointMismatch, match=told):
        play.checkpoints.find(play.task.plan, facts)
    play.checkpoints.want(play.task)
    assert play.task.checkpoint.restoration is None
    assert play.task.failure is not None
    assert play.task.failure.reason is FailureReason.CHECKPOINT_MISMATCH
    assert re.search(told, play.task.failure.message)


@pytest.mark.parametrize(
    "lines",
    [b'{"step": 5, "loss": 1}\n', b'{"step": 1e3}\n', b"[]\n", b'{"step": 1, "loss": "x"}\n', b"\xff\n", b"{}\n" * 10**5],
)  # fmt: skip
def test_lines_of_losses_that_no_task_has_written_are_its_failure(tmp_path: Path, lines: bytes) -> None:
    play = Play(tmp_path)
    play.refuses, play.task.in_stream = False, False
    play.task.progress, play.task.checkpoint = trained(4), CheckpointState(stored_step=4)
    state = TaskState(play.task.saved_progress(), tensors(0.0), history=lines)
    write_checkpoint(cast(Store, play.store), PLACE, state)
    play.checkpoints.want(play.task)
    assert play.task.failure is not None
    assert play.task.failure.reason is FailureReason.CHECKPOINT_MISMATCH
    assert "the losses in the checkpoint after step 4 cannot be read" in play.task.failure.message


def forge(store: MemoryStore, change: dict[str, object]) -> None:
    """As whoever may write there would: the sums are right."""
    where = f"{PLACE}/step-4/"
    progress = json.dumps(json.loads(store.objects[f"{where}progress.json"]) | change).encode()
    manifest = json.loads(store.objects[f"{where}manifest.json"])
    (entry,) = (file for file in manifest["files"] if file["name"] == "progress.json")
    entry |= {"bytes": len(progress), "sha256": hashlib.sha256(progress).hexdigest()}
    store.objects |= {
        f"{where}progress.json": progress,
        f"{where}manifest.json": json.dumps(manifest).encode(),
    }


def test_nothing_holds_the_tensors_of_a_state_that_is_in_a_file_while_its_store_takes_its_time(
    tmp_path: Path,
) -> None:
    """But the task itself, which lets go of them when it needs them no more."""
    play = Play(tmp_path)
    held: list[list[object]] = []

    def answer(action: str, _: str) -> None:
        if action == "write" and not held:
            state = play.task.checkpoint.state
            assert state is not None
            alive = [weakref.ref(tensor) for tensor in state.tensors.values()]
            play.task.checkpoint = play.task.checkpoint.released()
            del state
            gc.collect()
            held.append([one() for one in alive])

    play.store = MemoryStore(answer)
    play.task.checkpoint = CheckpointState(state=TaskState(training_task_progress(), tensors(2.0)))
    play.checkpoints._write_newest(play.task)
    assert held == [[None, None, None]]


def test_a_checkpoint_that_is_fetched_takes_no_memory_where_that_is_counted(tmp_path: Path) -> None:
    folder = (tmp_path / "store").as_uri()
    number = 4 * 2**20
    state = TaskState(
        training_task_progress(), {prefix + Q: torch.rand(1024, number // 1024) for prefix in PREFIXES}
    )
    write_checkpoint(FileStore(), folder, state)
    before = data_bytes()
    found = newest_state(FileStore(), folder, scratch=Aside(tmp_path / "aside").folder)
    assert data_bytes() - before < 2**20
    assert found is not None
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in state.tensors.items())
    assert list((tmp_path / "aside").iterdir()) == []
    without = newest_state(FileStore(), folder, scratch=tmp_path / "no" / "room")
    assert without is not None
    assert without.tensors.keys() == state.tensors.keys()


def training_task_progress() -> SavedProgress:
    task = training_task()
    task.progress = trained(2)
    return task.saved_progress()
