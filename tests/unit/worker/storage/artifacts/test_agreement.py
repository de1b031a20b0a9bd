"""A checkpoint that a tenant has written: whole by its sums, and of numbers that no task could have."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from mlora_worker.protocol import EvaluationRecord, Message, StepRecord
from mlora_worker.storage.artifacts.agreement import LARGEST_HISTORY, most_bytes
from mlora_worker.storage.artifacts.checkpoint import (
    CheckpointManifest,
    newest_progress,
    newest_state,
    write_checkpoint,
)
from mlora_worker.storage.artifacts.task_state import (
    PREFIXES,
    CheckpointMismatch,
    EvaluationProgress,
    SavedProgress,
    TaskState,
    Wanted,
)
from mlora_worker.storage.errors import StorageError
from mlora_worker.storage.object_store.file_store import FileStore
from mlora_worker.storage.uri import file_path, file_uri
from tests.bounds import unbounded

NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
SHAPES = {NAME: (3, 4)}
FACTS = {"lora.rank": 3, "training.totalSteps": 100}
STORE = FileStore()


def tensors() -> dict[str, Tensor]:
    return {prefix + NAME: torch.ones(3, 4) for prefix in PREFIXES}


def state(step: int) -> TaskState:
    record = EvaluationRecord(step=step, loss=1.5, token_accuracy=0.5, tokens=9)
    progress = SavedProgress(
        step=step,
        total_steps=100,
        updates=step,
        epoch=0,
        epoch_step=step,
        learning_rate=0.1,
        last=StepRecord(step=step, loss=0.5, learning_rate=0.1, grad_norm=1.0, tokens=5),
        tokens=11,
        seconds=0.25,
        evaluation=EvaluationProgress(last=record, best=record, reference=1.5),
        task_uid="uid",
        task="n/a",
        fingerprint=dict(FACTS),
    )
    return TaskState(progress, tensors(), {NAME: torch.ones(3, 4)}, b'{"step": 1, "loss": 0.5}\n')


@pytest.fixture
def folder(tmp_path: Path) -> str:
    made = file_uri(tmp_path / "checkpoints")
    for step in (4, 5):
        write_checkpoint(STORE, made, state(step))
    return made


def forge(folder: str, name: str, data: bytes, **claims: Any) -> None:
    """Another file in step 5, with its sum in the manifest; ``claims``: what the manifest says else."""
    place = file_path(folder) / "step-5"
    (place / name).write_bytes(data)
    manifest = json.loads((place / "manifest.json").read_text())
    (entry,) = (file for file in manifest["files"] if file["name"] == name)
    entry |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest(), **claims}
    (place / "manifest.json").write_text(json.dumps(manifest))


def forge_progress(folder: str, change: Mapping[str, Any]) -> None:
    content = json.loads((file_path(folder) / "step-5" / "progress.json").read_text())
    for path, value in change.items():
        *parents, last = path.split(".")
        place = content
        for parent in parents:
            place = place[parent]
        place[last] = value
    # As text: Python's own parser would not read some of these numbers back.
    forge(folder, "progress.json", json.dumps(content).encode())


WANTED = Wanted(FACTS, SHAPES)


def test_a_checkpoint_of_the_task_is_taken_up(folder: str) -> None:
    found = newest_state(STORE, folder, WANTED)
    assert found is not None
    assert found.progress == state(5).progress
    assert found.history == state(5).history


@pytest.mark.parametrize("moments", [1, 2])
@pytest.mark.parametrize("held", [1, 2])
def test_a_checkpoint_has_the_moments_of_the_tasks_optimizer(tmp_path: Path, held: int, moments: int) -> None:
    place = file_uri(tmp_path)
    some = {prefix + NAME: torch.ones(3, 4) for prefix in PREFIXES[: 1 + held]}
    write_checkpoint(STORE, place, replace(state(5), tensors=some))
    wanted = replace(WANTED, moments=moments)
    if held == moments:
        assert newest_state(STORE, place, wanted) is not None
    else:
        with pytest.raises(CheckpointMismatch, match="is unexpected or missing"):
            newest_state(STORE, place, wanted)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"step": 6, "last.step": 6, "updates": 6}, "another step or task than its manifest"),
        ({"step": 10**9, "totalSteps": 10**9}, "another step or task than its manifest"),
        ({"taskUid": "other"}, "another step or task than its manifest"),
        ({"updates": 16_777_217}, "updates is 16777217, step is 5"),
        ({"updates": 6}, "updates is 6, step is 5"),
        ({"updates": 0}, "updates is 0"),
        ({"totalSteps": 4}, "step is 5, totalSteps is 4"),
        ({"last.step": 4}, r"last\.step is 4, step is 5"),
        ({"last.tokens": 12}, r"last\.tokens is 12, tokens is 11"),
        ({"evaluation.last.step": 6}, r"evaluation\.last\.step is 6, step is 5"),
        ({"evaluation.best.step": 6}, r"evaluation\.best\.step is 6, step is 5"),
        ({"evaluation.since": 7}, r"evaluation\.since is 7, step is 5"),
        ({"tokens": -1}, "tokens"),
        ({"seconds": -1.0}, "seconds"),
        ({"seconds": 1e101}, "seconds"),
        ({"seconds": float("nan")}, "cannot be read"),
        ({"seconds": float("inf")}, "cannot be read"),
        ({"learningRate": float("nan")}, "cannot be read"),
        ({"fingerprint": [[]] * 5}, "fingerprint"),
    ],
)
def test_numbers_that_contradict_each_other_are_named_and_nothing_is_taken_up(
    folder: str, change: Mapping[str, Any], told: str
) -> None:
    forge_progress(folder, change)
    for read in (newest_progress, lambda *args: newest_state(*args, WANTED)):
        with pytest.raises(CheckpointMismatch, match=told) as caught:
            read(STORE, folder)
        assert len(str(caught.value)) < 2000
    assert (file_path(folder) / "step-5" / "manifest.json").exists(), "it is somebody's, and stays"


@pytest.mark.parametrize("text", ["1" + "0" * 400, "1" + "0" * 10_000, "1e400", "[" * 10_000, "5e-324"])
@pytest.mark.parametrize("field", ["tokens", "seconds", "step", "updates", "totalSteps", "epoch"])
def test_numbers_beyond_all_numbers_are_no_progress(folder: str, field: str, text: str) -> None:
    content = (file_path(folder) / "step-5" / "progress.json").read_text()
    before = json.dumps(json.loads(content)[field])
    forged = content.replace(f'"{field}":{before}', f'"{field}":{text}', 1)
    assert forged != content
    forge(folder, "progress.json", forged.encode())
    if (field, text) == ("seconds", "5e-324"):  # a number, and what is made of it is none: see test_telling
        assert newest_progress(STORE, folder) is not None
        return
    with pytest.raises(CheckpointMismatch):
        newest_progress(STORE, folder)


def test_another_number_of_steps_than_the_tasks_is_refused(folder: str) -> None:
    """Beside the fact of that name."""
    forge_progress(folder, {"totalSteps": 200})
    with pytest.raises(CheckpointMismatch, match="totalSteps is 200, the task has 100"):
        newest_state(STORE, folder, WANTED)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda found: found.pop("parameters." + NAME), "is unexpected or missing"),
        (lambda found: found.pop("secondMoments." + NAME), "is unexpected or missing"),
        (lambda found: found.update(more=torch.ones(1)), "more is unexpected"),
        (lambda found: found.update({"best.other": torch.ones(3, 4)}), "is unexpected"),
        (lambda found: found.update({"best." + NAME: torch.ones(1, 1)}), r"of shape \[1, 1\], not \[3, 4\]"),
        (lambda found: found.update({"parameters." + NAME: torch.ones(1, 4)}), r"of shape \[1, 4\], not"),
        (lambda found: found.update({"parameters." + NAME: torch.ones(3, 4).double()}), "float64"),
        (lambda found: found.update({"parameters." + NAME: torch.ones(3, 4).int()}), "int32"),
        (lambda found: found.update(history=torch.ones(5)), "history is not text"),
        (lambda found: found.update(history=torch.ones(2, 2, dtype=torch.uint8)), "history is not text"),
    ],
)
def test_tensors_of_another_adapter_never_reach_a_stage(
    folder: str, change: Callable[[dict[str, Tensor]], None], told: str
) -> None:
    found = state(5).filed()
    change(found)
    forge(folder, "state.safetensors", save(found))
    with pytest.raises(CheckpointMismatch, match=told):
        newest_state(STORE, folder, WANTED)


class Sparse(FileStore):
    """Says how much was read at most."""

    def __init__(self) -> None:
        super().__init__()
        self.read_bytes = 0

    def read(self, uri: str, most: int) -> bytes:
        found = super().read(uri, most)
        self.read_bytes = max(self.read_bytes, len(found))
        return found


@pytest.mark.parametrize("name", ["state.safetensors", "progress.json", "manifest.json"])
@pytest.mark.parametrize(
    "honest", [True, False], ids=["the manifest says so", "the manifest does not say so"]
)
def test_a_file_of_200_gb_is_not_read(folder: str, name: str, honest: bool) -> None:
    place = file_path(folder) / "step-5"
    if honest and name != "manifest.json":
        forge(folder, name, b"", bytes=200 * 2**30)
    with (place / name).open("r+b") as file:
        file.truncate(200 * 2**30)  # a hole
    store = Sparse()
    if honest and name != "manifest.json":
        with pytest.raises(CheckpointMismatch, match=name):
            newest_state(store, folder, WANTED)
    else:
        found = newest_state(store, folder, WANTED)
        assert found is not None
        assert found.progress.step == 4, "one that is not what its manifest says is passed over"
    assert store.read_bytes <= most_bytes(SHAPES)
    assert most_bytes(SHAPES) < LARGEST_HISTORY + 2**21


def test_checkpoints_without_end_are_not_all_tried(folder: str) -> None:
    root = file_path(folder)
    for step in range(100, 140):
        (root / f"step-{step}").mkdir()
        (root / f"step-{step}" / "manifest.json").write_bytes(b"{}" if step % 2 else b"[" * 10_000)
    with pytest.raises(CheckpointMismatch, match=r"the newest 16 checkpoints at .* were all damaged"):
        newest_state(STORE, folder, WANTED)


def test_more_files_than_any_task_has_are_an_error_and_no_work(folder: str) -> None:
    root = file_path(folder) / "step-9"
    root.mkdir()
    for number in range(10_001):
        (root / str(number)).touch()
    with pytest.raises(StorageError, match="more than 10000 objects"):
        newest_progress(STORE, folder)


@pytest.mark.parametrize("name", ["step-" + "9" * 5000, "step-٥", "step-05", "step-0", "step--5", "step-5x"])
def test_folders_that_only_look_like_steps_are_none(folder: str, name: str) -> None:
    class Listed(FileStore):
        def list(self, prefix: str, most: int) -> list[str]:
            return [*super().list(prefix, most), f"{folder}/{name}/manifest.json"]

    found = newest_progress(Listed(), folder)
    assert found is not None
    assert found.step == 5


def test_a_manifest_of_many_files_is_refused(folder: str) -> None:
    path = file_path(folder) / "step-5" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"] += [{"name": str(number), "bytes": 1, "sha256": "0" * 64} for number in range(1000)]
    path.write_text(json.dumps(manifest))
    with pytest.raises(CheckpointMismatch, match=r"manifest\.json"):
        newest_progress(STORE, folder)


@pytest.mark.parametrize("kind", [SavedProgress, CheckpointManifest], ids=lambda one: one.__name__)
def test_every_number_text_and_list_of_a_checkpoint_has_bounds(kind: type[Message]) -> None:
    assert unbounded(kind) == []
