from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 97,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass
class Saved:
    """A small random model with its folder, as the source of its tensors; remembers which were read."""

    folder: Path
    model: PreTrainedModel
    read: list[str] = field(default_factory=list)
    hidden: frozenset[str] = frozenset()  # tensors that the files lack

    def names(self) -> Collection[str]:
        tied = self.model.config.tie_word_embeddings
        names = {name for name in self.model.state_dict() if not (tied and name == "lm_head.weight")}
        return names - self.hidden

    def tensor(self, name: str) -> Tensor:
        self.read.append(name)
        return self.model.state_dict()[name]


@pytest.fixture
def small_model(tmp_path: Path) -> Callable[..., Saved]:
    """``small_model(model_type, **config)``: in eval mode, with transformers' own attention."""

    def make(model_type: str = "llama", **options: Any) -> Saved:
        torch.manual_seed(3)
        config = AutoConfig.for_model(model_type, **(SMALL | options))
        config.save_pretrained(tmp_path)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
        return Saved(tmp_path, model.eval())

    return make
