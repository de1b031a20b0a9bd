"""What lies at an output already, and whose it is: nobody's finished work is replaced unasked."""

from __future__ import annotations

import json
import re
from typing import Final

from mlora_worker.protocol import MANIFEST_NAME, FailureReason, TaskPlan
from mlora_worker.storage.errors import ObjectNotFound, StorageError
from mlora_worker.storage.object_store.store import Store
from mlora_worker.storage.uri import join
from mlora_worker.storage.versioned_json import plain_json

MARK_NAME: Final = ".mlora-upload.json"  # whose files lie there that no manifest lists yet
FOREIGN: Final = ("adapter_model.safetensors", "adapter_config.json", "adapter_model.bin")
_MOST: Final = 1 << 20  # bytes of a manifest of which its owner is asked
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


class OutputExists(StorageError):
    """Something of others lies there, and the task does not say that it may be replaced."""

    def __init__(self, uri: str, what: str) -> None:
        super().__init__(
            FailureReason.OUTPUT_EXISTS,
            f"{uri} has {what}. To replace it, set spec.output.overwrite to true, which is possible at any time "
            f"(mlora run: --overwrite). Otherwise move the existing files, or choose another spec.output.uri in a "
            f"new task",
        )


def check_free(store: Store, uri: str, task: TaskPlan) -> None:
    """Whether ``task`` may write below ``uri``. Raises OutputExists, and StorageError.

    1. A task that says so may replace whatever lies there.
    2. With a manifest, what lies there is the work of the task whose uid is in it. A task of the same name is another one.
    3. Without one, an adapter's files are those of the task that has left its mark: its upload was cut off.
    4. Without manifest and mark they are somebody else's, unless this task has trained before: then the place was free when
       it began, and a worker of a version that left no marks has begun to upload it.
    """
    if task.output_overwrite:
        return
    manifest = _read(store, join(uri, MANIFEST_NAME))
    if manifest is not None:
        owner = _owner(manifest)
        if owner.get("taskUid") != task.uid:
            raise OutputExists(uri, _of_manifest(owner, task))
        return
    found = next((name for name in FOREIGN if store.exists(join(uri, name))), None)
    if found is None:
        return
    mark = _read(store, join(uri, MARK_NAME))
    if mark is not None and _owner(mark).get("taskUid") != task.uid:
        raise OutputExists(uri, "files of another task's upload")
    if mark is None and not task.started:
        raise OutputExists(uri, f"an adapter without a manifest ({found})")


def set_mark(store: Store, uri: str, task: TaskPlan) -> None:
    """Before the first file of an upload is written."""
    store.write(join(uri, MARK_NAME), json.dumps({"taskUid": task.uid}).encode())


def remove_mark(store: Store, uri: str) -> None:
    """Behind the manifest, which says from then on whose it is."""
    store.delete(join(uri, MARK_NAME))


def _read(store: Store, uri: str) -> bytes | None:
    try:
        return store.read(uri, _MOST)
    except ObjectNotFound:
        return None


def _owner(document: bytes) -> dict[str, object]:
    """What it says; nothing where it is not JSON that anybody could have meant. Written by others, it may be anything."""
    try:
        plain = plain_json(document)
    except ValueError:
        return {}
    return plain if isinstance(plain, dict) else {}


def _of_manifest(owner: dict[str, object], task: TaskPlan) -> str:
    """In words that name nothing of another namespace."""
    name, namespace, step = (owner.get(key) for key in ("name", "namespace", "step"))
    if not (isinstance(name, str) and isinstance(namespace, str) and _NAME.fullmatch(name)):
        return f"a {MANIFEST_NAME} that this worker cannot read"
    if namespace != task.namespace:
        return "the adapter of another namespace's task"
    steps = f" after {step} steps" if isinstance(step, int) and 0 < step < 10**12 else ""
    earlier = "an earlier task of the same name" if name == task.name else f"task {name}"
    return f"the adapter of {earlier}{steps}"
