"""A model of SmolLM2-135M's sizes whose heads can be dealt to two ranks: 8 heads and 4 key heads in the place of 9 and 3.

Its weights are random: time and bytes do not depend on values. Rows and tokenizer are SmolLM2's.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from bench.base import with_tokenizer
from bench.network.formulae import Model

HEADS, KEY_HEADS, HEAD_SIZE = 8, 4, 72


def network_folder(whole: Path, target: Path, layers: int | None = None) -> Path:
    """``layers``: fewer than the model has."""
    set_verbosity_error()
    disable_progress_bar()
    config = AutoConfig.from_pretrained(whole)
    config.num_attention_heads, config.num_key_value_heads = HEADS, KEY_HEADS
    config.head_dim = HEAD_SIZE
    config.num_hidden_layers = layers or config.num_hidden_layers
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(target)
    return with_tokenizer(whole, target)


def sizes(folder: Path, targets: tuple[str, ...], rank: int) -> Model:
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    layers = sum(one.numel() for one in model.model.layers.parameters())
    whole = sum(one.numel() for one in model.parameters())  # a tied head counts once
    adapter = sum(
        rank * (module.in_features + module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name.rpartition(".")[2] in targets
    )
    return Model(config.hidden_size, config.num_hidden_layers, layers, whole - layers, adapter)
