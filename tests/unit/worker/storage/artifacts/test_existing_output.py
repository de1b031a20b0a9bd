"""What others have finished is replaced only where a task says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlora_worker.protocol import MANIFEST_NAME, FailureReason, LoRAConfig, StorageAccess, TaskPlan
from mlora_worker.storage.artifacts.existing_output import MARK_NAME, OutputExists, check_free, set_mark
from mlora_worker.storage.errors import AccessRefused, StorageError
from mlora_worker.storage.object_store.store import open_store

from .test_adapter import OUT, SMALL, publish

OTHER = {"uid": "uid-2", "name": "other-bot"}


def changed(task: TaskPlan, **fields: Any) -> TaskPlan:
    return task.model_copy(update=fields)


def manifest(memory: Any) -> dict[str, Any]:
    return json.loads(memory.objects[f"{OUT}/{MANIFEST_NAME}"])  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("story", "fields", "words"),
    [
        ("another task", OTHER, "the adapter of task support-bot after 50 steps"),
        ("deleted and made again", {"uid": "uid-2"}, "an earlier task of the same name after 50 steps"),
        (
            "made again with another rank",
            {"uid": "uid-2", "lora": LoRAConfig(rank=64)},
            "an earlier task of the same name",
        ),
        ("another namespace's", {**OTHER, "namespace": "team-b"}, "the adapter of another namespace's task"),
    ],
)
def test_what_others_have_published_stays_and_the_message_says_how_to_replace_it(
    memory: Any, task: TaskPlan, story: str, fields: dict[str, Any], words: str
) -> None:
    publish(memory, task, SMALL)
    before, other = dict(memory.objects), changed(task, **fields)
    with pytest.raises(OutputExists) as refused:
        check_free(memory, OUT, other)
    assert refused.value.reason is FailureReason.OUTPUT_EXISTS
    assert words in str(refused.value), story
    assert "set spec.output.overwrite to true" in str(refused.value)
    with pytest.raises(OutputExists):
        publish(memory, other, {name: tensor * 2 for name, tensor in SMALL.items()})
    assert memory.objects == before, "not a byte of it"
    if "namespace" in fields:
        assert "support-bot after" not in str(refused.value)
        assert "team-a" not in str(refused.value).replace(OUT, "")


def test_a_task_that_says_so_replaces_it(memory: Any, task: TaskPlan) -> None:
    publish(memory, task, SMALL)
    publish(memory, changed(task, **OTHER, output_overwrite=True), SMALL)
    assert manifest(memory)["taskUid"] == "uid-2"


def test_a_tasks_own_work_is_no_obstacle(memory: Any, task: TaskPlan) -> None:
    """Tried again, or started again with other rows in its ConfigMap."""
    publish(memory, task, SMALL)
    publish(memory, changed(task, template_text="{{ a }}"), SMALL)
    assert manifest(memory)["taskUid"] == task.uid


@pytest.mark.parametrize("writes", range(1, 9))
def test_an_upload_that_was_cut_off_is_gone_on_with_by_its_own_task_alone(
    memory: Any, task: TaskPlan, writes: int
) -> None:
    memory.writes_left = writes
    with pytest.raises(StorageError):
        publish(memory, task, SMALL)
    memory.writes_left = None
    if f"{OUT}/adapter_model.safetensors" in memory.objects:
        with pytest.raises(OutputExists):
            publish(memory, changed(task, **OTHER), SMALL)
    publish(memory, task, SMALL)
    assert manifest(memory)["taskUid"] == task.uid
    assert f"{OUT}/{MARK_NAME}" not in memory.objects


@pytest.mark.parametrize(
    ("story", "objects", "words"),
    [
        (
            "weights",
            {"adapter_model.safetensors": b"x"},
            "without a manifest (adapter_model.safetensors)",
        ),
        ("older weights", {"adapter_model.bin": b"x"}, "without a manifest (adapter_model.bin)"),
        ("a configuration", {"adapter_config.json": b"{}"}, "without a manifest (adapter_config.json)"),
        ("a manifest of something else", {MANIFEST_NAME: b'{"name": "an app"}'}, "cannot read"),
        ("a manifest that is none", {MANIFEST_NAME: b"\xff"}, "cannot read"),
        ("a list", {MANIFEST_NAME: b"[1]"}, "cannot read"),
        ("depth", {MANIFEST_NAME: b"[" * 100_000}, "cannot read"),
        (
            "a manifest with a forged name",
            {MANIFEST_NAME: b'{"taskUid": "u", "namespace": "team-a", "name": "x\\nERROR all is lost"}'},
            "cannot read",
        ),
    ],
)
def test_what_somebody_put_there_by_hand_stays_too(
    memory: Any, task: TaskPlan, story: str, objects: dict[str, bytes], words: str
) -> None:
    for name, content in objects.items():
        memory.objects[f"{OUT}/{name}"] = content
    with pytest.raises(OutputExists) as refused:
        check_free(memory, OUT, task)
    assert words in str(refused.value), story
    assert "\n" not in str(refused.value)
    check_free(memory, OUT, changed(task, output_overwrite=True))


@pytest.mark.parametrize("there", [{}, {"checkpoints/x/progress.json": b"{}"}, {"README.md": b"hello"}])
def test_a_folder_without_an_adapter_is_free(memory: Any, task: TaskPlan, there: dict[str, bytes]) -> None:
    for name, content in there.items():
        memory.objects[f"{OUT}/{name}"] = content
    check_free(memory, OUT, task)


@pytest.mark.parametrize(
    ("story", "mark", "started", "free"),
    [
        ("a former version began to upload it", None, True, True),
        ("it was there before the task", None, False, False),
        ("another task brings it", "uid-2", True, False),
        ("its own, by its mark", "uid-1", False, True),
        ("a mark that is none", "", True, False),
    ],
)
def test_files_without_a_manifest(
    memory: Any, task: TaskPlan, story: str, mark: str | None, started: bool, free: bool
) -> None:
    memory.objects[f"{OUT}/adapter_model.safetensors"] = b"x"
    if mark:
        set_mark(memory, OUT, changed(task, uid=mark))
    elif mark is not None:
        memory.objects[f"{OUT}/{MARK_NAME}"] = b"not JSON"
    one = changed(task, started=started)
    refused = False
    try:
        check_free(memory, OUT, one)
    except OutputExists:
        refused = True
    assert refused is not free, story


def test_a_store_that_does_not_let_us_look_is_not_taken_for_an_empty_one(memory: Any, task: TaskPlan) -> None:
    def refuses(action: str, uri: str) -> None:
        if action == "read":
            raise AccessRefused(f"no right to read {uri}")

    memory.on_call = refuses
    with pytest.raises(AccessRefused):
        check_free(memory, OUT, task)


def test_files_of_a_folder_are_looked_at_alike(task: TaskPlan, tmp_path: Path) -> None:
    store, place = open_store(StorageAccess(), allow_files=True), tmp_path.as_uri()
    check_free(store, place, task)
    publish(store, task, SMALL, place)
    assert not (tmp_path / MARK_NAME).exists()
    with pytest.raises(OutputExists):
        publish(store, changed(task, **OTHER), SMALL, place)
