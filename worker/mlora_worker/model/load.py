"""Reads one stage: only its own layers' tensors, each straight to its device and type."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mlora_worker.frozen.biased import BiasedWeight
from mlora_worker.frozen.experts import SegmentTokens
from mlora_worker.frozen.linear import Freeze, FrozenLinear
from mlora_worker.frozen.plain import PlainWeight
from mlora_worker.model.altup import GATHERED, SPREAD, CutAltUp, Gathered, Spread
from mlora_worker.model.architecture import (
    architecture_of,
    decoder_layers,
    family_of,
    layer_prefix,
    meta_model,
    parts_of,
    read_config,
)
from mlora_worker.model.experts import (
    stored_names,
)
from mlora_worker.model.facts import stage_layers
from mlora_worker.model.families import Family, embedding_factor_of, logit_factor_of
from mlora_worker.model.fusing import fuse
from mlora_worker.model.layer_inputs import PARTS, LayerInputs
from mlora_worker.model.leftovers import leftovers
from mlora_worker.model.quantisation import need_library, stored_form
from mlora_worker.model.reading import Routed, TensorReader, compute_buffers
from mlora_worker.model.recurrent.choice import choose_kernels
from mlora_worker.model.renamed import Renamed, TensorSource, moved
from mlora_worker.model.rotary import make_rotary
from mlora_worker.model.shared_keys import unused_names
from mlora_worker.model.stage import Stage
from mlora_worker.model.text_part import name_in_text_part, place_of, text_config

logger = logging.getLogger(__name__)
_NAMED = 5  # dropped tensors in a line of the log


def load_stage(
    folder: Path,
    source: TensorSource,
    stage: int,
    stages: int,
    dtype: torch.dtype,
    device: torch.device,
    freeze: Freeze = PlainWeight,
    freeze_head: Freeze = PlainWeight,
) -> Stage:
    """Stage ``stage`` of ``stages`` of the model whose config.json is in ``folder``: frozen, in eval mode.

    ``freeze_head`` makes the weight of the head, whose tensor may be the embedding's.
    ``freeze`` makes the weights of the linear modules, one after the other: no more than one matrix is there as it was
    read. What the checkpoint has quantised stays as it is.

    Raises UnsupportedModel, TooManyStages, IncompleteModel, and what ``source`` raises.
    """
    model = meta_model(read_config(folder), dtype)
    config, family = model.config, family_of(model.config)
    text = text_config(config)
    parts = parts_of(model, family)
    architecture, decoder = architecture_of(model), decoder_layers(model)
    layer_range = stage_layers(architecture, stages)[stage]
    root = f"{model.base_model_prefix}."
    form = stored_form(config)
    if form is not None and form.needs_library:
        need_library("this checkpoint, which is quantised by bitsandbytes,")
    if architecture.is_part:
        source = Renamed(source, partial(name_in_text_part, place_of(config)))
    if family.old_root is not None:
        source = Renamed(source, partial(moved, family.old_root, root))
    reader = TensorReader(source, root, dtype, device, form)
    names, stacks = family.experts, {stack.layer: stack for stack in architecture.experts}
    other_names = [name for name in (family.old_head_name,) if name]
    if names is not None:
        for index, stack in stacks.items():
            other_names += stored_names(stack, names, layer_prefix(model, index))
    unused = unused_names(decoder, reader.plain_names)
    dropped = leftovers(model, reader.plain_names - unused, other_names)
    first, last = stage == 0, stage == stages - 1
    if first and dropped:
        logger.warning(
            "%d stored tensors do not belong to a model of type %s and are ignored: %s",
            len(dropped), config.model_type, ", ".join(dropped[:_NAMED]) + (", ..." if dropped[_NAMED:] else ""),
        )  # fmt: skip

    def filled(attribute: str | None) -> Any:
        module = None if attribute is None else getattr(model.base_model, attribute)
        if module is not None:
            tied = attribute == family.embedding and config.tie_word_embeddings
            reader.fill(model, module, f"{root}{attribute}.", _head_name(model) if tied else None)
        return module

    layers, segments = nn.ModuleList(decoder[index] for index in layer_range).eval(), SegmentTokens()
    for index in layer_range:
        own = stacks.get(index)
        routed = None if own is None or names is None else Routed(own, names, segments)
        reader.fill(
            model,
            decoder[index],
            layer_prefix(model, index),
            freeze=freeze,
            routed=routed,
            plain=family.frozen,
        )
        if architecture.copies > 1:
            decoder[index].altup = CutAltUp(decoder[index].altup, segments)
        fuse(decoder[index], device)
    recurrence = choose_kernels(layers, device)
    embedding, positions = (
        (filled(family.embedding), filled(family.learned_positions)) if first else (None, None)
    )
    entry = [filled(name) for name in PARTS] if first and architecture.layer_inputs else []
    copied = architecture.copies > 1
    spread = Spread(filled(SPREAD), segments) if first and copied else None
    gathered = Gathered(filled(GATHERED), segments) if last and copied else None
    norm = filled(family.norm) if last else None
    head = None
    if last:
        head_weight, tied_head = _head_weight(model, family, reader, embedding)
        architecture = replace(architecture, tied_head=tied_head)
        head, bias = freeze_head(head_weight), model.get_output_embeddings().bias
        if bias is not None:
            head = BiasedWeight(head, reader.read(_head_name(model, "bias"), bias.shape))
    end = nn.ModuleList([] if norm is None else [norm])
    fuse(end, device)
    rotary = parts[family.rotary] if family.rotary else None
    layer_inputs = LayerInputs(model.base_model, segments) if entry else None
    if layer_inputs is not None:
        compute_buffers(model, layer_inputs, device)
    return Stage(
        index=stage,
        stages=stages,
        architecture=architecture,
        layer_range=layer_range,
        layers=layers,
        rotary=None if rotary is None else make_rotary(rotary).to(device),
        layer_types=tuple(
            text.layer_types[index] if family.rotary_by_layer_type else None for index in layer_range
        ),
        embedding=embedding,
        positions=positions,
        norm=end[0] if last else None,
        head_weight=head,
        logit_cap=getattr(text, family.logit_cap) if family.logit_cap else None,
        embedding_factor=embedding_factor_of(family, text),
        logit_factor=logit_factor_of(family, text),
        linears={
            layer_prefix(model, index) + name: module
            for index in layer_range
            for name, module in decoder[index].named_modules()
            if isinstance(module, FrozenLinear)
        },
        dtype=dtype,
        device=device,
        layer_inputs=layer_inputs,
        spread=spread,
        gathered=gathered,
        segments=segments,
        recurrence=recurrence,
    )


def _head_name(model: PreTrainedModel, tensor: str = "weight") -> str:
    head = model.get_output_embeddings()
    (name,) = (name for name, module in model.named_modules() if module is head)
    return f"{name}.{tensor}"


def _head_weight(
    model: PreTrainedModel, family: Family, reader: TensorReader, embedding: nn.Module | None
) -> tuple[Tensor, bool]:
    """[vocabulary, size], and whether it is the embedding's weight, which is read again when the embedding is on another
    stage.

    Of a head that config.json calls tied, the files may have one that is another: as in transformers, the files are right.
    """
    name, shape = _head_name(model), model.get_output_embeddings().weight.shape
    if not model.config.tie_word_embeddings:
        return reader.read(name, shape, family.old_head_name), False
    embedded = (
        next(embedding.parameters()).detach()
        if embedding is not None
        else reader.read(f"{model.base_model_prefix}.{family.embedding}.weight", shape, name)
    )
    if not reader.has(name, family.old_head_name):
        return embedded, True
    own = reader.read(name, shape, family.old_head_name)
    return (embedded, True) if torch.equal(own, embedded) else (own, False)
