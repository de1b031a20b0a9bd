"""Which base models are supported, and their shape from the configuration alone (no weights are read).

A supported model's decoder is ``embed_tokens``, a list ``layers`` that maps hidden states to hidden states,
``norm`` and ``rotary_emb``, with nothing between them, and a linear head without further arithmetic.
Structure cannot prove that (some models scale their embeddings or logits in ``forward``), so types are listed
by name; a test compares each with transformers' own forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from mlora_worker.model.attention import PACKED_ATTENTION
from mlora_worker.model.errors import UnsupportedModel
from mlora_worker.stream.costs import embed_cost, head_cost

SUPPORTED_TYPES = (
    "arcee",
    "llama",
    "ministral",
    "mistral",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen3",
    "seed_oss",
    "smollm3",
    "starcoder2",
)
# These choose their frequencies by the longest position of the batch: a row's result would depend on its
# neighbours.
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear module of a decoder layer: one that an adapter may be added to."""

    path: str  # in the causal LM, such as model.layers.3.self_attn.q_proj
    layer: int
    in_features: int
    out_features: int

    @property
    def name(self) -> str:
        """Last part of the path: what users write as a target module."""
        return self.path.rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class Architecture:
    """Shape of a base model."""

    hidden_size: int
    intermediate_size: int
    layers: int
    attention_heads: int
    vocab_size: int
    max_positions: int
    tied_head: bool  # the head's weight is the embedding's
    linears: tuple[Linear, ...]  # by layer, in the order of the layer's own modules

    def layer_costs(self) -> list[float]:
        """Multiply-adds per token of each layer's linear modules."""
        costs = [0.0] * self.layers
        for linear in self.linears:
            costs[linear.layer] += linear.in_features * linear.out_features
        return costs

    @property
    def embed_cost(self) -> float:
        return embed_cost(self.hidden_size)

    @property
    def head_cost(self) -> float:
        return head_cost(self.hidden_size, self.vocab_size)


def read_config(folder: Path) -> PretrainedConfig:
    """The configuration of the model in ``folder``. Raises UnsupportedModel."""
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError) as error:
        raise UnsupportedModel(f"config.json of the base model cannot be used: {error}") from error
    if config.model_type not in SUPPORTED_TYPES:
        raise UnsupportedModel(
            f"model type {config.model_type} is not supported; supported are {', '.join(SUPPORTED_TYPES)}"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModel("the base model is quantized; serve one with plain float weights")
    rope_type = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope_type in _BATCH_DEPENDENT_ROPE:
        raise UnsupportedModel(
            f"rope type {rope_type} depends on a batch's longest row: tasks would change each other's results"
        )
    return config


def meta_model(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The whole causal LM on the meta device, with packed attention, frozen, in eval mode. Raises
    UnsupportedModel.
    """
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=PACKED_ATTENTION
            )
    except ValueError as error:
        words = str(error).partition("\n")[0][:300]
        raise UnsupportedModel(f"{config.model_type} is no causal language model: {words}") from error
    decoder, head = model.base_model, model.get_output_embeddings()
    missing = [
        part for part in ("embed_tokens", "layers", "norm", "rotary_emb") if not hasattr(decoder, part)
    ]
    if "layers" not in missing and not isinstance(decoder.layers, nn.ModuleList):
        missing.append("list of decoder layers")
    if not isinstance(head, nn.Linear):
        missing.append("linear head")
    if missing:
        raise UnsupportedModel(
            f"{type(model).__name__} is not built as expected: its decoder has no {', no '.join(missing)}"
        )
    if head.bias is not None:
        raise UnsupportedModel("a head with a bias is not supported")
    model.requires_grad_(False)
    return model.eval()


def layer_prefix(model: PreTrainedModel, layer: int) -> str:
    return f"{model.base_model_prefix}.layers.{layer}."


def architecture_of(model: PreTrainedModel) -> Architecture:
    """Reads shapes only, so a meta model serves."""
    config = model.config
    linears = tuple(
        Linear(layer_prefix(model, index) + name, index, module.in_features, module.out_features)
        for index, layer in enumerate(model.base_model.layers)
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear)
    )
    return Architecture(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        layers=len(model.base_model.layers),
        attention_heads=config.num_attention_heads,
        vocab_size=config.vocab_size,
        max_positions=config.max_position_embeddings,
        tied_head=bool(config.tie_word_embeddings),
        linears=linears,
    )


def read_architecture(folder: Path) -> Architecture:
    """Raises UnsupportedModel."""
    return architecture_of(meta_model(read_config(folder), torch.float32))
