"""Models of well-known shapes with random weights: no checkpoint has to be there, and time does not depend on values."""

from __future__ import annotations

import math
import tempfile
import zlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from bench.gpu.shapes import SHAPES
from mlora_worker.frozen.linear import Freeze
from mlora_worker.frozen.plain import PlainWeight
from mlora_worker.model.architecture import meta_model, read_config
from mlora_worker.model.load import load_stage
from mlora_worker.model.stage import Stage


class RandomWeights:
    """Tensors as a checkpoint of the model of ``config`` has them, each made when it is asked for, by its name."""

    def __init__(self, config: LlamaConfig, dtype: torch.dtype, device: torch.device) -> None:
        model = meta_model(config, dtype)
        self._dtype, self._device = dtype, device
        self._shapes = {
            name: like.shape
            for name, like in model.state_dict().items()
            if not (config.tie_word_embeddings and name == "lm_head.weight")
        }

    def names(self) -> Collection[str]:
        return self._shapes.keys()

    def tensor(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, dtype=self._dtype, device=self._device)
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        made = torch.empty(shape, dtype=self._dtype, device=self._device)
        return made.normal_(std=1 / math.sqrt(shape[1]), generator=generator)


@dataclass(frozen=True)
class Base:
    """One set of frozen weights, for both sides."""

    stage: Stage  # this project's
    model: Any  # transformers', in training mode


def random_stage(
    shape: str, dtype: torch.dtype, device: torch.device, freeze: Freeze = PlainWeight
) -> tuple[Stage, Any]:
    """The whole model as one stage, and its configuration; ``freeze`` makes the linear modules' weights."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        LlamaConfig(
            **SHAPES[shape], max_position_embeddings=8192, architectures=["LlamaForCausalLM"]
        ).save_pretrained(folder)
        config = read_config(folder)
        weights = RandomWeights(config, dtype, device)
        return load_stage(folder, weights, 0, 1, dtype, device, freeze), config


def random_base(shape: str, dtype: torch.dtype, device: torch.device) -> Base:
    stage, config = random_stage(shape, dtype, device)
    model: Any = meta_model(config, dtype)
    # The stage has read every tensor; the model gets the very same.
    assert stage.embedding is not None
    assert stage.norm is not None
    assert stage.head_weight is not None
    for own, theirs in ((stage.layers, model.model.layers), (stage.norm, model.model.norm)):
        # A frozen weight is a module of its own.
        state = {name.removesuffix(".matrix"): tensor for name, tensor in own.state_dict().items()}
        theirs.load_state_dict(state, assign=True)
    model.model.embed_tokens.weight = stage.embedding.weight
    model.lm_head.weight = torch.nn.Parameter(stage.head_weight.dense(dtype), requires_grad=False)
    model.model.rotary_emb = stage.rotary
    model.requires_grad_(False)
    left = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    assert not left, f"{left[0]} has no values"
    return Base(stage, model.train())
