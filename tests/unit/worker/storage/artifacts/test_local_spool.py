"""Work that its store refuses, on the rank's own volume: whole or not there, its owner's alone, gone when not needed."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mlora_worker.protocol import DataCounts, StepRecord
from mlora_worker.storage.artifacts.adapter import FinishedAdapter
from mlora_worker.storage.artifacts.local_spool import KEPT_SECONDS, LocalSpool
from mlora_worker.storage.artifacts.task_state import SavedProgress, TaskState

ADAPTER = FinishedAdapter(
    tensors={"q.lora_A.weight": torch.arange(6.0).reshape(2, 3), "q.lora_B.weight": torch.ones(3, 2)},
    config={"r": 2, "target_modules": ["q"], "revision": None},
    step=50,
    loss=1 / 3,
    data=DataCounts(rows=3, used=2, dropped={"NoAnswer": 1}, first_dropped={"NoAnswer": (2,)}),
    quantization="nf4, double",
    base_type="mixtral",
)


def state(step: int) -> TaskState:
    progress = SavedProgress(
        step=step, total_steps=100, updates=step, epoch=0, epoch_step=step, learning_rate=0.1,
        last=StepRecord(step=step, loss=0.5, learning_rate=0.1, grad_norm=1.0, tokens=5), tokens=11, seconds=0.25,
        task_uid="uid", task="n/a", fingerprint={"lora.rank": 2},
    )  # fmt: skip
    return TaskState(progress, {"parameters.layers.0.lora_A": torch.full((2, 3), float(step))})


def steps_below(root: Path) -> set[str]:
    return {path.name for path in root.rglob("step-*")}


def test_another_process_finds_the_newest_state_and_no_older_one_stays(tmp_path: Path) -> None:
    kept = LocalSpool(tmp_path / "kept")
    for step in (5, 10):
        kept.keep_state("uid", state(step))
    found = LocalSpool(tmp_path / "kept").state("uid", newer_than=5)
    assert found is not None
    assert found.progress == state(10).progress
    assert torch.equal(found.tensors["parameters.layers.0.lora_A"], torch.full((2, 3), 10.0))
    assert steps_below(tmp_path) == {"step-10"}


def test_a_state_is_given_to_its_own_task_only_and_only_when_it_is_newer(tmp_path: Path) -> None:
    kept = LocalSpool(tmp_path)
    kept.keep_state("uid", state(10))
    assert kept.state("uid", newer_than=10) is None
    assert kept.state("another", newer_than=0) is None


@pytest.mark.parametrize("uid", ["../../outside", "a/b", "a%2Fb"])
def test_a_uid_names_a_folder_of_its_own_directly_below_the_root_whatever_is_in_it(
    tmp_path: Path, uid: str
) -> None:
    root = tmp_path / "deep" / "er" / "kept"
    kept = LocalSpool(root)
    for one in (uid, "a"):
        kept.keep_state(one, state(10))
    assert len([path for path in root.iterdir() if path.name.startswith("task-")]) == 2
    assert {path.parents[2] for path in tmp_path.rglob("step-*")} == {root}
    kept.forget("a")
    assert kept.state(uid, newer_than=0) is not None


def test_the_same_state_is_written_once(tmp_path: Path) -> None:
    kept = LocalSpool(tmp_path)
    kept.keep_state("uid", state(10))
    [manifest] = tmp_path.rglob("manifest.json")
    written = manifest.stat().st_mtime_ns
    kept.keep_state("uid", state(10))
    assert manifest.stat().st_mtime_ns == written


def test_a_state_that_was_forgotten_can_be_kept_again_and_nothing_else_stays(tmp_path: Path) -> None:
    kept = LocalSpool(tmp_path)
    kept.keep_state("uid", state(10))
    kept.forget_states("uid")
    assert list(tmp_path.iterdir()) == []
    kept.keep_state("uid", state(10))
    assert kept.state("uid", newer_than=0) is not None


def test_a_finished_adapter_outlives_the_process_that_made_it(tmp_path: Path) -> None:
    with LocalSpool(tmp_path).weights("uid", "print", ADAPTER) as path:
        assert load_file(path).keys() == ADAPTER.tensors.keys()
    again = LocalSpool(tmp_path)
    found = again.adapter("uid", "print")
    assert found is not None
    assert (found.config, found.step, found.loss, found.data) == (
        ADAPTER.config, ADAPTER.step, ADAPTER.loss, ADAPTER.data,
    )  # fmt: skip
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in ADAPTER.tensors.items())
    before = path.stat().st_ino
    with again.weights("uid", "print", found) as once_more:
        assert (once_more, once_more.stat().st_ino) == (path, before), "it is not written again"
    again.forget("uid")
    assert list(tmp_path.iterdir()) == []
    assert again.adapter("uid", "print") is None


def test_a_finished_adapter_may_be_kept_before_its_turn_to_be_uploaded_comes_and_is_written_once(
    tmp_path: Path,
) -> None:
    kept = LocalSpool(tmp_path)
    kept.keep_adapter("uid", "print", ADAPTER)
    assert LocalSpool(tmp_path).adapter("uid", "print") is not None
    [record] = tmp_path.rglob("record.json")
    written = record.stat().st_mtime_ns
    kept.keep_adapter("uid", "print", ADAPTER)
    assert record.stat().st_mtime_ns == written
    kept.forget("uid")
    kept.keep_adapter("uid", "print", ADAPTER)
    assert kept.adapter("uid", "print") is not None


def test_a_finished_adapter_is_of_one_task_and_one_spec(tmp_path: Path) -> None:
    kept = LocalSpool(tmp_path)
    with kept.weights("uid", "print", ADAPTER):
        pass
    assert kept.adapter("another", "print") is None
    assert kept.adapter("uid", "other print") is None
    other = FinishedAdapter({"q.lora_B.weight": torch.zeros(1)}, {}, 1, None, None)
    with kept.weights("uid", "other print", other) as path:
        assert load_file(path).keys() == other.tensors.keys()
    assert kept.adapter("uid", "print") is None


def test_what_a_later_version_has_added_to_the_record_is_passed_over(tmp_path: Path) -> None:
    with LocalSpool(tmp_path).weights("uid", "print", ADAPTER) as weights:
        record = weights.with_name("record.json")
    record.write_text(json.dumps(json.loads(record.read_text()) | {"new": 1}))
    assert LocalSpool(tmp_path).adapter("uid", "print") is not None


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "record.json"])
@pytest.mark.parametrize("harm", [cut, flip, Path.unlink])
def test_half_of_a_finished_adapter_is_none(tmp_path: Path, name: str, harm: Callable[[Path], None]) -> None:
    kept = LocalSpool(tmp_path)
    with kept.weights("uid", "print", ADAPTER) as path:
        harm(path.with_name(name))
    assert kept.adapter("uid", "print") is None


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "record.json", "history.jsonl"])
@pytest.mark.parametrize("harm", [cut, flip, Path.unlink])
def test_what_was_damaged_is_written_anew_before_it_is_uploaded(
    tmp_path: Path, name: str, harm: Callable[[Path], None]
) -> None:
    adapter = dataclasses.replace(ADAPTER, history=b'{"step":1}\n')
    with LocalSpool(tmp_path).weights("uid", "print", adapter) as weights:
        whole = weights.read_bytes()
    harm(weights.with_name(name))
    with LocalSpool(tmp_path).weights("uid", "print", adapter) as weights:
        assert weights.read_bytes() == whole
    assert LocalSpool(tmp_path).adapter("uid", "print") is not None


@pytest.mark.parametrize("change", [{"config": {"r": 4}}, {"step": 49}, {"loss": 1.0}])
def test_what_was_kept_of_another_outcome_is_not_uploaded(tmp_path: Path, change: dict[str, Any]) -> None:
    with LocalSpool(tmp_path).weights("uid", "print", ADAPTER):
        pass
    tensors = {name: tensor * 2 for name, tensor in ADAPTER.tensors.items()}
    other = dataclasses.replace(ADAPTER, tensors=tensors, **change)
    with LocalSpool(tmp_path).weights("uid", "print", other) as weights:
        assert torch.equal(load_file(weights)["q.lora_A.weight"], tensors["q.lora_A.weight"])


def test_only_the_owner_may_enter_or_read(tmp_path: Path) -> None:
    root = tmp_path / "kept"
    before = os.umask(0o022)
    try:
        kept = LocalSpool(root)
        kept.keep_state("uid", state(5))
        with kept.weights("uid", "print", ADAPTER):
            modes = {path.stat().st_mode & 0o777 for path in (root, *root.rglob("*"))}
    finally:
        os.umask(before)
    assert modes == {0o700, 0o600}


@pytest.mark.parametrize("root", ["none", "a file"])
def test_without_a_volume_the_upload_has_its_file_all_the_same(tmp_path: Path, root: str) -> None:
    (tmp_path / "file").touch()
    kept = LocalSpool(None if root == "none" else tmp_path / "file")
    kept.keep_state("uid", state(5))
    assert kept.state("uid", newer_than=0) is None
    with kept.weights("uid", "print", ADAPTER) as path:
        assert load_file(path).keys() == ADAPTER.tensors.keys()
    assert not path.exists()
    assert kept.adapter("uid", "print") is None
    kept.forget_states("uid")
    kept.forget("uid")
    kept.clean(time.time())


@pytest.mark.parametrize("uid", ["../../elsewhere", "..", "a/b", "a b%2F"])
def test_no_name_leads_out_of_the_root(tmp_path: Path, uid: str) -> None:
    kept = LocalSpool(tmp_path / "deep" / "kept")
    kept.keep_state(uid, state(5))
    assert {path.parent for path in (tmp_path / "deep").rglob("task-*")} == {tmp_path / "deep" / "kept"}
    assert kept.state(uid, newer_than=0) is not None


def test_at_the_start_what_nobody_has_asked_for_in_a_week_goes(tmp_path: Path) -> None:
    kept = LocalSpool(tmp_path)
    kept.keep_state("uid", state(5))
    now = time.time()
    kept.clean(now + KEPT_SECONDS - 60)
    assert kept.state("uid", newer_than=0) is not None
    kept.clean(now + KEPT_SECONDS + 60)
    assert list(tmp_path.iterdir()) == []
