"""The base model of a rank, and what the operator has to know of its stage."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch

from mlora_worker.frozen.linear import Freeze
from mlora_worker.frozen.plain import PlainWeight
from mlora_worker.model.architecture import read_config
from mlora_worker.model.products import choose_products, load_with
from mlora_worker.model.quantisation import check_once, freeze_of, stored_form
from mlora_worker.model.stage import Stage
from mlora_worker.protocol import (
    StageReport,
    WorkerConfig,
)
from mlora_worker.rank.stores import pipelines_store
from mlora_worker.storage.base_model.model_source import ModelFiles, RemoteAccess, pinned
from mlora_worker.storage.base_model.model_source import open_model as open_model_files
from mlora_worker.storage.object_store.store import read_hub_token

log = logging.getLogger(__name__)

_WHOLE = 64 * 2**20  # bytes


def open_model(config: WorkerConfig) -> ModelFiles:
    store = pipelines_store(config)
    return open_model_files(store, config.model, Path(config.cache_dir), remote_access(config))


def remote_access(config: WorkerConfig) -> RemoteAccess:
    keys_dir = config.storage_keys_dir
    return RemoteAccess(
        hub_endpoint=config.hub_endpoint,
        hub_token=lambda: None if keys_dir is None else read_hub_token(Path(keys_dir)),
        allowed_networks=config.allowed_networks,
        cache_bytes=config.model_cache_bytes,
    )


def with_pinned_model(config: WorkerConfig) -> WorkerConfig:
    """With the commit that a model on a hub is at now."""
    return with_commit(config, pinned(config.model, remote_access(config)).commit)


def with_commit(config: WorkerConfig, commit: str | None) -> WorkerConfig:
    return config.model_copy(update={"model": config.model.model_copy(update={"commit": commit})})


def stage_report(
    rank: int, stage: Stage, device: torch.device, groups: tuple[tuple[str, ...], ...]
) -> StageReport:
    """What the operator's memory model needs to know of this stage."""
    return StageReport(
        stage=rank,
        first_layer=stage.layer_range.start,
        last_layer=stage.layer_range.stop - 1,
        device=str(device),
        resident_bytes=stage.resident_bytes,
        capacity_bytes=capacity_bytes(device),
        input_groups=groups,
        parameters=stage.parameters,
        products=stage.products,
        quantized=stage.quantised or None,
        recurrence=stage.recurrence,
    )


def capacity_bytes(device: torch.device) -> int:
    """What torch may have of the device's memory: neither the libraries' contexts and channels that are open by now, nor
    what other processes hold; in whole steps, since what contexts take differs a little from start to start, and the
    operator hears few reports of other stages in an hour. On CPU the container's limit, or the machine's memory."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device)) // _WHOLE * _WHOLE
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limit = int(Path(path).read_text())
        except (OSError, ValueError):  # no such hierarchy, or "max"
            continue
        return min(limit, machine)
    return machine


def load_own_stage(config: WorkerConfig, rank: int, files: ModelFiles, device: torch.device) -> Stage:
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    folder, wanted = files.folder(), config.model.quantization
    form = stored_form(read_config(folder))
    check_once(form, wanted)
    quantised = form is not None or wanted is not None
    # Quantised matrices are multiplied as they are when they are dense, so there is always room.
    budget = None if quantised else config.memory_budget or capacity_bytes(device)
    chosen = choose_products(folder, rank, config.stages, dtype, device, budget)
    log.info("products with the frozen weights are those of %s: %s", chosen.name, chosen.why)
    freeze: Freeze | None = PlainWeight if quantised else None
    if wanted is not None:
        freeze = freeze_of(wanted) or PlainWeight
        log.info("the frozen matrices are kept as %s and become dense for each product", wanted.label)
    stage = load_with(chosen, folder, files, rank, config.stages, dtype, device, freeze)
    files.prove()
    log.info("layers %d to %d are loaded on %s", stage.layer_range.start, stage.layer_range.stop - 1, device)
    return stage
