"""The adapter of every type loads in PEFT with each of its keys, and what PEFT would refuse to load is refused before."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from mlora_worker.model.errors import UnknownTargetModule
from mlora_worker.model.facts import model_facts, resolve_targets
from mlora_worker.model.families import FAMILIES
from mlora_worker.protocol import LoRAConfig
from tests.equivalence.mixtures import IDS, TRAINING, lora, published
from tests.equivalence.tasks import Base, Row, Task, train
from tests.fixtures.model_options import FAMILY, TARGETS, TRAINED_VARIANTS


@pytest.mark.parametrize("kind", [*FAMILIES, *TRAINED_VARIANTS])
def test_the_published_adapter_loads_in_peft_with_every_key(
    small_model: Any, tmp_path: Path, rows: Callable[..., list[Row]], kind: str
) -> None:
    model_type, options = TRAINED_VARIANTS.get(kind, (kind, FAMILY.get(kind, {})))
    saved = small_model(model_type, **options)
    base, asked = Base(saved.folder, saved.model), lora(kind, dropout=0.1)
    trained = train(base, 1, [Task("t", asked, TRAINING, rows(6, 1, vocabulary=97), 8)])["t"]
    published(base, asked, tmp_path, trained)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # PEFT warns of missing and of unexpected keys
        model = PeftModel.from_pretrained(copy.deepcopy(saved.model), tmp_path)
    held = {
        name.replace(".default", ""): tensor for name, tensor in model.named_parameters() if "lora_" in name
    }
    assert held.keys() == trained.adapter.keys()
    assert all(torch.equal(held[name], tensor) for name, tensor in trained.adapter.items())
    without = saved.model(IDS[None]).logits
    assert (model(IDS[None]).logits - without).norm() > 0.01 * without.norm()


def test_experts_of_two_matrices_get_no_adapter(small_model: Any) -> None:
    model_type, options = TRAINED_VARIANTS["nemotron_h of experts"]
    facts = model_facts(small_model(model_type, **options).folder, 1, torch.float32)
    for entry in ("experts.up_proj", "experts.gate_up_proj", "experts.down_proj"):
        with pytest.raises(UnknownTargetModule, match="no routed experts that can have adapters"):
            resolve_targets(facts, LoRAConfig(rank=2, target_modules=("q_proj",), target_parameters=(entry,)))


@pytest.mark.parametrize("model_type", ["falcon_h1", "nemotron_h"])
def test_modules_to_which_peft_adds_nothing_get_no_adapter(small_model: Any, model_type: str) -> None:
    saved = small_model(model_type, **FAMILY[model_type])
    with pytest.raises(ValueError, match="Module 'out_proj' is incompatible"):
        get_peft_model(saved.model, LoraConfig(target_modules=["out_proj"], task_type="CAUSAL_LM"))
    facts = model_facts(saved.folder, 1, torch.float32)
    with pytest.raises(UnknownTargetModule, match="out_proj"):
        resolve_targets(facts, LoRAConfig(rank=2, target_modules=("q_proj", "out_proj")))
    every = resolve_targets(facts, LoRAConfig(rank=2, target_modules=("all-linear",)))
    assert {target.module.name for target in every} == {*TARGETS[model_type], "up_proj", "down_proj"}
