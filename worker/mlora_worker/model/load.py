"""Reads one stage: only its own layers' tensors, each straight to its device and type."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mlora_worker.model.architecture import (
    architecture_of,
    layer_prefix,
    meta_model,
    read_config,
)
from mlora_worker.model.errors import IncompleteModel, UnsupportedModel
from mlora_worker.model.facts import stage_layers
from mlora_worker.model.fused import fuse
from mlora_worker.model.stage import Stage


class TensorSource(Protocol):
    """Tensors of the checkpoint by name; each is read when asked for."""

    def names(self) -> Collection[str]: ...
    def tensor(self, name: str) -> Tensor: ...


def load_stage(
    folder: Path, source: TensorSource, stage: int, stages: int, dtype: torch.dtype, device: torch.device
) -> Stage:
    """Stage ``stage`` of ``stages`` of the model whose config.json is in ``folder``: frozen, in eval mode.

    Raises UnsupportedModel, TooManyStages, IncompleteModel, and what ``source`` raises.
    """
    model = meta_model(read_config(folder), dtype)
    architecture = architecture_of(model)
    layer_range = stage_layers(architecture, stages)[stage]
    reader = _Reader(source, dtype, device)
    decoder, root = model.base_model, model.base_model_prefix
    first, last = stage == 0, stage == stages - 1

    layers = nn.ModuleList(decoder.layers[index] for index in layer_range).eval()
    for index in layer_range:
        reader.fill(decoder.layers[index], layer_prefix(model, index))
    if first:
        reader.fill(decoder.embed_tokens, f"{root}.embed_tokens.")
    head_weight = None
    if last:
        reader.fill(decoder.norm, f"{root}.norm.")
        head_weight = _head_weight(model, reader, tied=architecture.tied_head, embedded=first)
    body = nn.ModuleList([*layers, decoder.norm] if last else layers)
    fuse(body)
    return Stage(
        index=stage,
        stages=stages,
        architecture=architecture,
        layer_range=layer_range,
        layers=layers,
        # Frequencies are no part of a checkpoint: made anew, in float32 whatever the weights' type.
        rotary=type(decoder.rotary_emb)(config=model.config).to(device),
        embedding=decoder.embed_tokens if first else None,
        norm=body[-1] if last else None,
        head_weight=head_weight,
        linears={
            layer_prefix(model, index) + name: module
            for index in layer_range
            for name, module in decoder.layers[index].named_modules()
            if isinstance(module, nn.Linear)
        },
        dtype=dtype,
        device=device,
    )


def _head_weight(model: PreTrainedModel, reader: _Reader, *, tied: bool, embedded: bool) -> Tensor:
    """[vocabulary, size]. A tied head is the embedding's weight, read again when the embedding is on another
    stage.
    """
    if tied and embedded:
        weight: Tensor = model.base_model.embed_tokens.weight
        return weight.detach()
    head = model.get_output_embeddings()
    name = f"{model.base_model_prefix}.embed_tokens.weight" if tied else "lm_head.weight"
    return reader.read(name, head.weight.shape)


class _Reader:
    def __init__(self, source: TensorSource, dtype: torch.dtype, device: torch.device) -> None:
        self._source, self._dtype, self._device = source, dtype, device
        self._names = frozenset(source.names())

    def read(self, name: str, shape: torch.Size) -> Tensor:
        if name not in self._names:
            raise IncompleteModel(f"the model's files have no tensor {name}, which its config.json asks for")
        found = self._source.tensor(name)
        if found.shape != shape:
            raise IncompleteModel(
                f"tensor {name} has shape {list(found.shape)} in the model's files, "
                f"but config.json says {list(shape)}"
            )
        # A copy of our own: a view of a mapped file may be badly aligned, and changes when the file does.
        return torch.empty(shape, dtype=self._dtype, device=self._device).copy_(found)

    def fill(self, module: nn.Module, prefix: str) -> None:
        """Replace the meta tensors of ``module`` by those of the source below ``prefix``."""
        state = {name: self.read(prefix + name, like.shape) for name, like in module.state_dict().items()}
        module.load_state_dict(state, strict=True, assign=True)
        module.requires_grad_(False)
        left = [
            name for name, tensor in (*module.named_parameters(), *module.named_buffers()) if tensor.is_meta
        ]
        if left:
            raise UnsupportedModel(
                f"{prefix}{left[0]} is computed by the model itself in a way that is not known here"
            )
