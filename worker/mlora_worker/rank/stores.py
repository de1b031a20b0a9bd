"""Where a rank puts what tasks have made: checkpoints, kept work, and what no stage computes with."""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch

from mlora_worker.coordinator.uploads.checkpoints import KEPT_BYTES, OpenCheckpoints
from mlora_worker.data.training_rows.reference_files import ReferenceFiles
from mlora_worker.protocol import (
    TaskPlan,
    WorkerConfig,
)
from mlora_worker.storage.artifacts.aside import Aside
from mlora_worker.storage.artifacts.local_spool import LocalSpool
from mlora_worker.storage.object_store.s3_client import S3Options
from mlora_worker.storage.object_store.store import Store, open_store_from_files
from mlora_worker.storage.uri import join


def pipelines_store(config: WorkerConfig) -> Store:
    """Where its model is, and its checkpoints if they have a place of their own. Its keys are read at each use."""
    return open_store_from_files(
        config.storage_endpoint,
        config.storage_region,
        config.storage_keys_dir,
        allow_files=True,
        options=S3Options.of_pipeline(config),
    )


def open_checkpoints(config: WorkerConfig) -> OpenCheckpoints | None:
    """The pipeline's own place for checkpoints, with the keys of its model; None where each task has its own."""
    root = config.checkpoints_uri
    if root is None:
        return None

    def place(task: TaskPlan) -> tuple[Store, str]:
        return pipelines_store(config), join(root, f"{task.namespace}/{task.name}")

    return place


def local_spool(config: WorkerConfig) -> LocalSpool:
    """Where finished work waits for a store that refuses it: beside the model's files, cleaned of what is left over."""
    kept = LocalSpool(Path(config.cache_dir) / "kept")
    kept.clean(time.time())
    return kept


def reference_files(config: WorkerConfig) -> ReferenceFiles:
    """Beside the tokenised rows. Only of a base whose commit is known: another one may change under its name."""
    model = config.model
    base = None
    if model.commit is not None:
        quantization = model.quantization.label if model.quantization is not None else None
        base = json.dumps([model.name, model.uri, model.commit, model.dtype, quantization])
    return ReferenceFiles(Path(config.cache_dir) / "references", base)


def aside_of(config: WorkerConfig, device: torch.device) -> Aside:
    """Where what nobody computes with goes: into files where the process has a budget of all its memory."""
    made = Aside(Path(config.cache_dir) / "aside" if _counts_all_memory(config, device) else None)
    made.clean()
    return made


def kept_bytes(config: WorkerConfig, device: torch.device) -> int:
    """Of states that wait in memory though the store has them. Where the process has a budget of all its memory, none: they
    would take room from tasks that train, which no sum of the operator's counts.
    """
    return 0 if _counts_all_memory(config, device) else KEPT_BYTES


def _counts_all_memory(config: WorkerConfig, device: torch.device) -> bool:
    """The budget is of all that the process has in memory, not of a GPU's."""
    return device.type == "cpu" and config.memory_budget is not None
