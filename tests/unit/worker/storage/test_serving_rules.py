"""vLLM's own rules for a PEFT folder, restated in our words, against what is published here.

Sources, in vllm-project/vllm: ``vllm/lora/peft_helper.py`` (fields of the configuration), ``vllm/config/lora.py`` (the list
of ranks that an engine can be started for), ``vllm/lora/utils.py`` (names of tensors), ``vllm/lora/lora_model.py`` (which
modules may have weights). Read at commits 0214369, 01230b4 and 001e63a.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mlora_worker.coordinator.preparation.expected_tensors import expected_tensors
from mlora_worker.model.architecture import read_architecture
from mlora_worker.model.facts import facts_of, resolve_targets
from mlora_worker.protocol import AdapterDtype, LoRAConfig, StorageAccess, TaskPlan
from mlora_worker.storage.artifacts.adapter import adapter_config, as_written, publish_adapter, save_weights
from mlora_worker.storage.object_store.scratch import scratch_folder
from mlora_worker.storage.object_store.store import open_store
from mlora_worker.stream.targets import published_names
from tests.fixtures.tiny_model import write_tiny_model

ENGINE_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
LAYER_MODULES = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def refusals(config: dict[str, Any], tensors: dict[str, torch.Tensor], engine_rank: int) -> list[str]:
    """Why an engine that was started for ``engine_rank`` would not load this."""
    told = [f"no {name}" for name in ("r", "lora_alpha", "target_modules") if name not in config]
    if config.get("modules_to_save"):
        told.append("modules_to_save")
    if config.get("use_dora"):
        told.append("DoRA")
    if config.get("bias", "none") != "none":
        told.append("bias")
    if not isinstance(config.get("lora_alpha"), int):
        told.append("lora_alpha is no integer")
    if not isinstance(config.get("target_modules"), list):
        told.append("target_modules is no list")
    if engine_rank not in ENGINE_RANKS:
        told.append("no such engine")
    if config.get("r", 0) > engine_rank:
        told.append("rank")
    halves: dict[str, set[str]] = {}
    for name, tensor in tensors.items():
        parts = name.split(".")
        if (
            parts[:2] != ["base_model", "model"]
            or parts[-1] != "weight"
            or parts[-2] not in ("lora_A", "lora_B")
        ):
            told.append(f"name {name}")
            continue
        if parts[-3] not in LAYER_MODULES:
            told.append(f"module {parts[-3]}")
        halves.setdefault(".".join(parts[2:-2]), set()).add(parts[-2])
        rank = tensor.shape[0 if parts[-2] == "lora_A" else 1]
        if rank > engine_rank:
            told.append(f"rank of {name}")
    told += [f"half of {module}" for module, found in halves.items() if found != {"lora_A", "lora_B"}]
    return told


def published(folder: Path, task: TaskPlan, lora: LoRAConfig, dtype: AdapterDtype) -> tuple[Any, Any]:
    facts = facts_of(read_architecture(write_tiny_model(folder / "base")), 1, torch.float32)
    targets = resolve_targets(facts, lora)
    tensors = {name: torch.ones(shape) for name, shape in expected_tensors(targets).items()}
    config = adapter_config(lora, "acme/tiny", None, published_names(facts, targets))
    out = folder / "out"
    store = open_store(StorageAccess(), allow_files=True)
    with scratch_folder(None, "adapter") as scratch:
        weights = save_weights(as_written(tensors, dtype), scratch)
        publish_adapter(store, out.as_uri(), weights, config, task=task, step=1, loss=1.0, data=None)
    return json.loads((out / "adapter_config.json").read_text()), load_file(out / "adapter_model.safetensors")


@pytest.mark.parametrize(
    "lora",
    [
        LoRAConfig(),
        LoRAConfig(rank=8, target_modules=("all-linear",)),
        LoRAConfig(rank=32, alpha=16, use_rslora=True),
        LoRAConfig(rank=8, layers_to_transform=(1,), target_modules=("q_proj", "down_proj")),
    ],
    ids=["default", "all-linear", "rsLoRA", "one layer"],
)
@pytest.mark.parametrize("dtype", [AdapterDtype.FLOAT32, AdapterDtype.BFLOAT16])
def test_a_published_adapter_passes_the_rules_of_an_engine_that_is_started_for_its_rank(
    tmp_path: Path, task: TaskPlan, lora: LoRAConfig, dtype: AdapterDtype
) -> None:
    config, tensors = published(tmp_path, task, lora, dtype)
    assert tensors
    assert (
        refusals(config, tensors, engine_rank=min(rank for rank in ENGINE_RANKS if rank >= lora.rank)) == []
    )


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"use_dora": True}, "DoRA"),
        ({"bias": "all"}, "bias"),
        ({"lora_alpha": 0.5}, "lora_alpha is no integer"),
        ({"target_modules": ".*q_proj"}, "target_modules is no list"),
        ({"r": 32}, "rank"),
        ({"r": 512}, "rank"),
    ],
)
def test_the_restated_rules_refuse_what_the_engine_refuses(
    tmp_path: Path, task: TaskPlan, change: dict[str, Any], told: str
) -> None:
    config, tensors = published(tmp_path, task, LoRAConfig(), AdapterDtype.FLOAT32)
    assert refusals(config | change, tensors, engine_rank=16) == [told]
    name = next(iter(tensors))
    assert f"name {name}.x" in refusals(config, {f"{name}.x": tensors[name]}, engine_rank=16)
