"""What others need to know of a base model, from its configuration alone; and the names of modules to
adapt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from mlora_worker.model.architecture import (
    Architecture,
    Linear,
    architecture_of,
    decoder_layers,
    family_of,
    meta_model,
    parts_of,
    read_architecture,
    read_config,
)
from mlora_worker.model.errors import InvalidTarget, UnknownTargetModule
from mlora_worker.model.partition import split_layers
from mlora_worker.model.rotary import make_rotary
from mlora_worker.protocol import FailureReason, LoRAConfig, ModelFacts, ModuleShape, StageShape
from mlora_worker.stream.fit import Misfit, target_names


def model_facts(folder: Path, stages: int, dtype: torch.dtype) -> ModelFacts:
    """Facts of the model in ``folder`` when cut into ``stages``. Raises UnsupportedModel, TooManyStages."""
    return facts_of(read_architecture(folder), stages, dtype)


def stage_layers(architecture: Architecture, stages: int) -> tuple[range, ...]:
    """The layers of each stage. Raises TooManyStages."""
    return split_layers(architecture.layer_costs(), stages, architecture.embed_cost, architecture.head_cost)


def facts_of(architecture: Architecture, stages: int, dtype: torch.dtype) -> ModelFacts:
    """Raises TooManyStages."""
    modules = []
    for stage, layers in enumerate(stage_layers(architecture, stages)):
        shapes = Counter(
            (linear.name, linear.in_features, linear.out_features)
            for linear in architecture.linears
            if linear.layer in layers
        )
        modules += [
            ModuleShape(stage=stage, name=name, in_features=inputs, out_features=outputs, count=count)
            for (name, inputs, outputs), count in shapes.items()
        ]
    return ModelFacts(
        hidden_size=architecture.hidden_size,
        intermediate_size=architecture.intermediate_size,
        layers=architecture.layers,
        attention_heads=architecture.attention_heads,
        vocab_size=architecture.vocab_size,
        max_positions=architecture.max_positions,
        dtype_bytes=dtype.itemsize,
        modules=tuple(modules),
    )


def stage_shapes(folder: Path, stages: int, dtype: torch.dtype) -> tuple[StageShape, ...]:
    """What each stage will hold, from the configuration alone. Raises UnsupportedModel, TooManyStages.

    ``resident_bytes`` are those that ``Stage.resident_bytes`` measures: a tied head counts once where the embedding is on
    the same stage, and again on the last stage otherwise, which has its own copy.
    """
    model = meta_model(read_config(folder), dtype)
    family, head = family_of(model.config), model.get_output_embeddings()
    parts = parts_of(model, family)
    architecture, layers = architecture_of(model), decoder_layers(model)
    rotary = parts.get(family.rotary) if family.rotary else None
    rotary_bytes = sum(buffer.nbytes for buffer in make_rotary(rotary).buffers()) if rotary else 0
    shapes = []
    for stage, own in enumerate(stage_layers(architecture, stages)):
        modules: list[nn.Module | None] = [layers[layer] for layer in own]
        modules += [parts[family.embedding]] if stage == 0 else []
        modules += [parts[family.learned_positions]] if stage == 0 and family.learned_positions else []
        modules += [parts[family.norm]] if stage == stages - 1 else []
        tensors = [
            tensor for module in modules if module for tensor in (*module.parameters(), *module.buffers())
        ]
        if stage == stages - 1 and not (architecture.tied_head and stages == 1):
            tensors.append(head.weight)
        shapes.append(
            StageShape(
                stage=stage,
                first_layer=own.start,
                last_layer=own.stop - 1,
                parameters=sum(tensor.numel() for tensor in tensors),
                resident_bytes=sum(tensor.nbytes for tensor in tensors) + rotary_bytes,
            )
        )
    return tuple(shapes)


def resolve_targets(facts: ModelFacts, lora: LoRAConfig) -> tuple[str, ...]:
    """The module names that ``lora`` adapts, each once, in the order of the model's layers.

    Raises UnknownTargetModule and InvalidTarget; see ``stream.fit.target_names``, which decides.
    """
    try:
        return target_names(facts, lora)
    except Misfit as error:
        unknown = error.reason is FailureReason.UNKNOWN_TARGET_MODULE
        raise (UnknownTargetModule if unknown else InvalidTarget)(str(error)) from None


def target_linears(architecture: Architecture, targets: Iterable[str]) -> tuple[Linear, ...]:
    """The linear modules of the whole model whose name is in ``targets`` (resolved names)."""
    wanted = frozenset(targets)
    return tuple(linear for linear in architecture.linears if linear.name in wanted)
