"""What tests of bases with routed experts share."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlora_worker.frozen.four_bits import nf4
from mlora_worker.frozen.linear import Freeze
from mlora_worker.model.architecture import read_architecture
from mlora_worker.model.attention import PackedRows
from mlora_worker.model.facts import facts_of, resolve_targets
from mlora_worker.protocol import LoRAConfig, Training
from mlora_worker.storage.artifacts.adapter import CONFIG_NAME, adapter_config, save_weights
from mlora_worker.stream.targets import published_names
from tests.equivalence.tasks import Base, Trained
from tests.fixtures.model_options import FAMILY, TARGETS

CPU = torch.device("cpu")


IDS = torch.randint(3, 97, (19,), generator=torch.Generator().manual_seed(0))


NF4: Freeze = partial(nf4, double=True)


TRAINING = Training(batch_size=3, learning_rate=2e-3, seed=5)


def lora(model_type: str, **options: Any) -> LoRAConfig:
    return LoRAConfig(**{"target_modules": TARGETS.get(model_type, ("all-linear",)), "rank": 4, **options})


@torch.no_grad()
def logits(stage: Any) -> Tensor:
    rows = PackedRows((len(IDS),), CPU)
    return stage.logits(stage.run_layers(stage.embed(IDS, rows), rows))  # type: ignore[no-any-return]


def wider(small_model: Any, model_type: str = "qwen3_moe") -> Base:
    """Wide enough for products whose bits depend on the number of rows."""
    own = FAMILY[model_type]
    sizes: dict[str, Any] = {"hidden_size": 96, "head_dim": 32, "intermediate_size": 64}
    sizes["num_local_experts" if "num_local_experts" in own else "num_experts"] = 4
    inner = ("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size")
    if own.get("rope_parameters", {}).get("rope_type") == "longrope":  # of which it has as many factors
        sizes["rope_parameters"] = None
    sizes |= {name: 64 for name in inner if name in own}
    saved = small_model(model_type, **(FAMILY[model_type] | sizes))
    return Base(saved.folder, saved.model)


def published(base: Base, asked: LoRAConfig, folder: Path, trained: Trained) -> None:
    architecture = read_architecture(base.folder)
    facts = facts_of(architecture, 1, torch.float32)
    names = published_names(facts, resolve_targets(facts, asked))
    save_weights(trained.adapter, folder)
    config = adapter_config(asked, "tiny", None, names, fan_in_fan_out=architecture.transposed)
    (folder / CONFIG_NAME).write_text(json.dumps(config))
