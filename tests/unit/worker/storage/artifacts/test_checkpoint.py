"""Checkpoints on a disk: whole or not there, the newest whole one counts, and nothing is left behind."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mlora_worker.protocol import FailureReason, StepRecord
from mlora_worker.storage.artifacts.agreement import check_fingerprint
from mlora_worker.storage.artifacts.checkpoint import (
    delete_checkpoints,
    layer_of,
    newest_progress,
    newest_state,
    stage_part,
    write_checkpoint,
)
from mlora_worker.storage.artifacts.task_state import CheckpointMismatch, Fact, SavedProgress, TaskState
from mlora_worker.storage.errors import StorageError
from mlora_worker.storage.object_store.file_store import FileStore
from mlora_worker.storage.uri import file_path, file_uri

NAMES = [f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_A.weight" for layer in (0, 2, 10)]


def state(step: int) -> TaskState:
    generator = torch.Generator().manual_seed(step)
    tensors: dict[str, Tensor] = {
        prefix + name: torch.randn(3, 4, generator=generator)
        for prefix in ("parameters.", "firstMoments.", "secondMoments.")
        for name in NAMES
    }
    progress = SavedProgress(
        step=step,
        total_steps=100,
        updates=step,
        epoch=1,
        epoch_step=2,
        learning_rate=0.1 + step / 7,
        last=StepRecord(step=step, loss=1 / 3, learning_rate=0.1, grad_norm=None, tokens=5),
        tokens=11,
        seconds=0.25,
        task_uid="uid",
        task="n/a",
        fingerprint={"lora.rank": 4, "lora.targetModules": ("k_proj", "q_proj"), "revision": None},
    )
    return TaskState(progress, tensors)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return file_uri(tmp_path / "out" / "checkpoints")


def files(folder: str) -> set[str]:
    root = file_path(folder)
    return {path.relative_to(root).as_posix() for path in root.rglob("*")}


def test_what_is_written_is_read_bit_for_bit(folder: str) -> None:
    store = FileStore()
    assert newest_state(store, folder) is None
    write_checkpoint(store, folder, state(7))
    found = newest_state(store, folder)
    assert found is not None
    assert found.progress == state(7).progress
    assert found.tensors.keys() == state(7).tensors.keys()
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in state(7).tensors.items())
    assert newest_progress(store, folder) == state(7).progress


def test_the_two_newest_stay_and_leftovers_of_older_ones_go(folder: str) -> None:
    store = FileStore()
    (file_path(folder) / "step-3").mkdir(parents=True)
    (file_path(folder) / "step-3" / "state.safetensors").write_bytes(b"killed while writing")
    for step in (5, 10, 15):
        write_checkpoint(store, folder, state(step))
    assert {name.partition("/")[0] for name in files(folder)} == {"step-10", "step-15"}
    newest = newest_progress(store, folder)
    assert newest is not None
    assert newest.step == 15


def test_one_without_a_manifest_does_not_exist_and_a_newer_one_in_writing_is_left_alone(folder: str) -> None:
    store = FileStore()
    write_checkpoint(store, folder, state(5))
    (file_path(folder) / "step-9").mkdir()
    (file_path(folder) / "step-9" / "state.safetensors").write_bytes(b"half")
    found = newest_state(store, folder)
    assert found is not None
    assert found.progress.step == 5
    write_checkpoint(store, folder, state(6))
    assert "step-9/state.safetensors" in files(folder)


@pytest.mark.parametrize("name", ["state.safetensors", "progress.json", "manifest.json"])
@pytest.mark.parametrize("harm", ["cut", "gone", "other"])
def test_a_damaged_one_is_removed_and_the_one_before_it_is_taken(folder: str, name: str, harm: str) -> None:
    store = FileStore()
    write_checkpoint(store, folder, state(5))
    write_checkpoint(store, folder, state(10))
    victim = file_path(folder) / "step-10" / name
    if harm == "cut":
        victim.write_bytes(victim.read_bytes()[:-3])
    elif harm == "gone":
        victim.unlink()
    else:
        victim.write_bytes((file_path(folder) / "step-5" / name).read_bytes())
    found = newest_state(store, folder)
    assert found is not None
    assert found.progress.step == 5
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in state(5).tensors.items())
    assert (name == "manifest.json" and harm == "gone") or "step-10" not in files(folder)


class Dying(FileStore):
    """Fails at its n-th write or delete, as when its process is killed there."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self._left = at

    def _step(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise StorageError(FailureReason.UPLOAD_FAILED, "killed")

    def write(self, uri: str, data: bytes) -> None:
        self._step()
        super().write(uri, data)

    def write_file(self, uri: str, path: Path) -> None:
        self._step()
        super().write_file(uri, path)

    def delete(self, uri: str) -> None:
        self._step()
        super().delete(uri)


@pytest.mark.parametrize("at", range(8))
@pytest.mark.parametrize("step", [10, 15])
def test_whenever_the_writer_dies_a_whole_checkpoint_is_found(folder: str, at: int, step: int) -> None:
    """Also when it writes one that is there already."""
    for whole in (5, 10):
        write_checkpoint(FileStore(), folder, state(whole))
    with contextlib.suppress(StorageError):
        write_checkpoint(Dying(at), folder, state(step))
    found = newest_state(FileStore(), folder)
    assert found is not None
    wanted = state(found.progress.step)
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in wanted.tensors.items())
    write_checkpoint(FileStore(), folder, state(step))
    again = newest_state(FileStore(), folder)
    assert again is not None
    assert again.progress.step == step


def test_nothing_is_left_when_the_task_is_at_its_end(folder: str) -> None:
    store = FileStore()
    write_checkpoint(store, folder, state(5))
    (file_path(folder) / "step-9").mkdir()
    (file_path(folder) / "step-9" / "state.safetensors").write_bytes(b"half")
    delete_checkpoints(store, folder)
    assert not file_path(folder).exists()
    delete_checkpoints(store, folder)


def test_another_format_is_refused_and_kept(folder: str) -> None:
    store = FileStore()
    write_checkpoint(store, folder, state(5))
    manifest = file_path(folder) / "step-5" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "version": 2, "new": 1}))
    for read in (newest_progress, newest_state):
        with pytest.raises(CheckpointMismatch, match="format version 2"):
            read(store, folder)
    assert manifest.exists()


def rewrite(folder: str, name: str, change: Callable[[dict[str, Any]], None] | bytes) -> None:
    """Writes a file of step 5 as another version of the worker would, with its sum in the manifest."""
    place = file_path(folder) / "step-5"
    if callable(change):
        content = json.loads((place / name).read_text())
        change(content)
        data = json.dumps(content).encode()
    else:
        data = change
    (place / name).write_bytes(data)
    if name != "manifest.json":
        manifest = json.loads((place / "manifest.json").read_text())
        (entry,) = (file for file in manifest["files"] if file["name"] == name)
        entry |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        (place / "manifest.json").write_text(json.dumps(manifest))


LATER_FIELDS: dict[str, tuple[str, Callable[[dict[str, Any]], None]]] = {
    "of the manifest": ("manifest.json", lambda content: content.update(new=1)),
    "of a file in it": ("manifest.json", lambda content: content["files"][0].update(new=1)),
    "another file": (
        "manifest.json",
        lambda content: content["files"].append({"name": "new", "bytes": 1, "sha256": "0" * 64}),
    ),
    "of the progress": ("progress.json", lambda content: content.update(new={"a": 1})),
    "of its last step": ("progress.json", lambda content: content["last"].update(new=0.5)),
}


@pytest.mark.parametrize("story", LATER_FIELDS)
def test_what_a_later_version_has_added_is_passed_over(folder: str, story: str) -> None:
    store = FileStore()
    write_checkpoint(store, folder, state(5))
    rewrite(folder, *LATER_FIELDS[story])
    assert newest_progress(store, folder) == state(5).progress
    found = newest_state(store, folder)
    assert found is not None
    assert found.progress == state(5).progress


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("progress.json", lambda content: content.update(tokens="11")),
        ("progress.json", lambda content: content.pop("seconds")),
        ("progress.json", b"\x00 packed"),
        ("state.safetensors", b"\x00 packed"),
        ("manifest.json", lambda content: content["files"].pop(0)),
        ("manifest.json", lambda content: content.update(files={"state": 1})),
    ],
)
def test_what_is_whole_and_cannot_be_read_is_another_versions_and_stays(
    folder: str, name: str, change: Callable[[dict[str, Any]], None] | bytes
) -> None:
    store = FileStore()
    write_checkpoint(store, folder, state(4))
    write_checkpoint(store, folder, state(5))
    rewrite(folder, name, change)
    before = files(folder)
    with pytest.raises(CheckpointMismatch, match=f"{name} was written by another version"):
        newest_state(store, folder)
    if name != "state.safetensors":
        with pytest.raises(CheckpointMismatch, match=f"{name} was written by another version"):
            newest_progress(store, folder)
    assert files(folder) == before


FACTS: dict[str, Fact] = {
    "lora.rank": 4,
    "lora.targetModules": ("k_proj", "q_proj"),
    "revision": None,
    "lr": 0.1,
}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda facts: {**facts, "lora.rank": 8}, "lora.rank 4, the task has 8"),
        (
            lambda facts: {**facts, "lora.targetModules": ("q_proj",)},
            "lora.targetModules k_proj, q_proj, the task has q_proj",
        ),
        (lambda facts: {**facts, "revision": "main"}, "revision none, the task has main"),
        (
            lambda facts: {name: fact for name, fact in facts.items() if name != "lr"},
            "lr 0.1, the task has none",
        ),
    ],
)
def test_a_mismatch_names_what_differs(
    change: Callable[[dict[str, Fact]], dict[str, Fact]], said: str
) -> None:
    with pytest.raises(CheckpointMismatch, match=said):
        check_fingerprint(FACTS, change(FACTS), "s3://b/p")


@pytest.mark.parametrize(
    ("found", "wanted", "differs"),
    [
        ({}, {"dataset.date": "2026-03-04"}, None),
        ({"dataset.date": "2026-03-04"}, {}, None),
        ({"dataset.date": "2026-02-27"}, {"dataset.date": "2026-03-04"}, "dataset.date 2026-02-27"),
        ({"dataset.sha256": "a"}, {"dataset.date": "2026-03-04", "dataset.sha256": "b"}, "dataset.sha256 a"),
    ],
    ids=[
        "from before it was a fact",
        "of a worker that told it of all rows",
        "of another day",
        "of other rows",
    ],
)
def test_the_day_counts_where_both_have_it(
    found: dict[str, Fact], wanted: dict[str, Fact], differs: str | None
) -> None:
    if differs is None:
        check_fingerprint({**FACTS, **found}, {**FACTS, **wanted}, "s3://b/p")
        return
    with pytest.raises(CheckpointMismatch, match=differs):
        check_fingerprint({**FACTS, **found}, {**FACTS, **wanted}, "s3://b/p")


def test_facts_that_travelled_as_json_are_the_same(folder: str) -> None:
    store = FileStore()
    write_checkpoint(store, folder, state(5))
    found = newest_progress(store, folder)
    assert found is not None
    check_fingerprint(found.fingerprint, state(5).progress.fingerprint, "here")


def test_a_stage_gets_the_tensors_of_its_layers() -> None:
    assert [layer_of(name) for name in NAMES] == [0, 2, 10]
    tensors = state(1).tensors
    parts = [stage_part(tensors, layers) for layers in (range(2), range(2, 11))]
    assert [len(part) for part in parts] == [3, 6]
    assert parts[0].keys() | parts[1].keys() == tensors.keys()
    with pytest.raises(ValueError, match="does not name a layer"):
        layer_of("lm_head.weight")
