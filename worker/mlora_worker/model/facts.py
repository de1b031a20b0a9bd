"""What others need to know of a base model, from its configuration alone; and the names of modules to
adapt.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch
from torch import nn

from mlora_worker.model.altup import GATHERED, SPREAD
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
    understood,
)
from mlora_worker.model.errors import InvalidTarget, UnknownTargetModule
from mlora_worker.model.experts import ExpertStack
from mlora_worker.model.layer_inputs import PARTS
from mlora_worker.model.partition import split_layers
from mlora_worker.model.quantisation import packed_bytes
from mlora_worker.model.rotary import make_rotary
from mlora_worker.protocol import (
    BorderShape,
    ExpertShape,
    FailureReason,
    LoRAConfig,
    ModelFacts,
    ModuleShape,
    Quantization,
    StageShape,
    StateShape,
)
from mlora_worker.stream.targets import Misfit, Target, targets_of


def model_facts(folder: Path, stages: int, dtype: torch.dtype) -> ModelFacts:
    """Facts of the model in ``folder`` when cut into ``stages``. Raises UnsupportedModel, TooManyStages."""
    return facts_of(read_architecture(folder), stages, dtype)


def stage_layers(architecture: Architecture, stages: int) -> tuple[range, ...]:
    """The layers of each stage. Raises TooManyStages."""
    return split_layers(architecture.layer_costs(), stages, architecture.embed_cost, architecture.head_cost)


@understood()
def facts_of(architecture: Architecture, stages: int, dtype: torch.dtype) -> ModelFacts:
    """Raises TooManyStages."""
    own = list(enumerate(stage_layers(architecture, stages)))
    modules = [shape for stage, layers in own for shape in _shapes(architecture.linears, stage, layers)]
    experts = [shape for stage, layers in own for shape in _expert_shapes(architecture, stage, layers)]
    return ModelFacts(
        hidden_size=architecture.hidden_size,
        intermediate_size=architecture.intermediate_size,
        layers=architecture.layers,
        attention_heads=architecture.attention_heads,
        vocab_size=architecture.vocab_size,
        max_positions=architecture.max_positions,
        dtype_bytes=dtype.itemsize,
        modules=tuple(modules),
        experts=tuple(experts) or None,
        borders=_borders(architecture, [layers for _, layers in own]),
        never_adapted=tuple(
            shape for stage, layers in own for shape in _shapes(architecture.never_adapted, stage, layers)
        )
        or None,
        states=tuple(state for stage, layers in own for state in _states(architecture, stage, layers, dtype))
        or None,
    )


def _borders(architecture: Architecture, stages: list[range]) -> tuple[BorderShape, ...] | None:
    """None: nothing but hidden states goes from stage to stage."""
    found = [architecture.border(layers.start) for layers in stages]
    if all(border.width == architecture.hidden_size for border in found):
        return None
    return tuple(BorderShape(forward=border.width, backward=border.learnt) for border in found)


@understood()
def stage_shapes(
    folder: Path, stages: int, dtype: torch.dtype, quantization: Quantization | None = None
) -> tuple[StageShape, ...]:
    """What each stage will hold, from the configuration alone. Raises UnsupportedModel, TooManyStages.

    ``resident_bytes`` are those that ``Stage.resident_bytes`` measures: a tied head counts once where the embedding is on
    the same stage, and again on the last stage otherwise, which has its own copy. Without kernels of another library.
    """
    config = read_config(folder)
    model, bytes_of = meta_model(config, dtype), packed_bytes(config, quantization)
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
        if stage == 0 and architecture.layer_inputs:
            modules += [getattr(model.base_model, name) for name in PARTS]
        if architecture.copies > 1:
            modules += [model.base_model.get_submodule(SPREAD)] if stage == 0 else []
            modules += [model.base_model.get_submodule(GATHERED)] if stage == stages - 1 else []
        modules += [parts[family.norm]] if stage == stages - 1 else []
        tensors = [
            tensor for module in modules if module for tensor in (*module.parameters(), *module.buffers())
        ]
        if stage == stages - 1 and not (architecture.tied_head and stages == 1):
            tensors.append(head.weight)
        if stage == stages - 1 and head.bias is not None:
            tensors.append(head.bias)
        if stage == 0 and architecture.layer_inputs:
            tensors += [*model.base_model.buffers(recurse=False)]  # scales of the layers' inputs
        resident = sum(tensor.nbytes for tensor in tensors) + rotary_bytes
        matrices = [(linear, 1) for linear in architecture.linears if linear.layer in own]
        for stack in architecture.experts:
            if stack.layer in own:
                matrices += [(one, stack.experts) for one in _matrices_of_one(stack)]
        saved = [
            count * (one.in_features * one.out_features * dtype.itemsize - size)
            for one, count in matrices
            if (size := bytes_of(one)) is not None
        ]
        shapes.append(
            StageShape(
                stage=stage,
                first_layer=own.start,
                last_layer=own.stop - 1,
                parameters=sum(tensor.numel() for tensor in tensors),
                resident_bytes=resident - sum(saved),
                quantized=bool(saved),
            )
        )
    return tuple(shapes)


def resolve_targets(facts: ModelFacts, lora: LoRAConfig) -> tuple[Target, ...]:
    """The modules of the whole model that ``lora`` adapts, layer by layer.

    Raises UnknownTargetModule and InvalidTarget; see ``stream.targets``, which decides.
    """
    try:
        return targets_of(facts, lora)
    except Misfit as error:
        unknown = error.reason is FailureReason.UNKNOWN_TARGET_MODULE
        raise (UnknownTargetModule if unknown else InvalidTarget)(str(error)) from None


def _shapes(linears: tuple[Linear, ...], stage: int, layers: range) -> list[ModuleShape]:
    """Those of ``linears`` that are on a stage; one entry for the same module in consecutive layers."""
    shapes: dict[tuple[str, int, int], list[ModuleShape]] = {}
    for linear in linears:
        if linear.layer not in layers or not linear.adapted:
            continue
        runs = shapes.setdefault((linear.pattern, linear.in_features, linear.out_features), [])
        if runs and runs[-1].first_layer + runs[-1].count == linear.layer:
            runs[-1] = runs[-1].model_copy(update={"count": runs[-1].count + 1})
            continue
        runs.append(
            ModuleShape(
                stage=stage,
                name=linear.name,
                in_features=linear.in_features,
                out_features=linear.out_features,
                count=1,
                path=linear.pattern,
                first_layer=linear.layer,
            )
        )
    return [shape for runs in shapes.values() for shape in runs]


def _matrices_of_one(stack: ExpertStack) -> list[Linear]:
    return [
        Linear(f"{stack.path}.0.{at}", stack.layer, inputs, outputs, "", of_expert=True)
        for at, (outputs, inputs) in enumerate(stack.matrices)
    ]


def _states(architecture: Architecture, stage: int, layers: range, dtype: torch.dtype) -> list[StateShape]:
    """One entry for alike ones of a stage."""
    sizes = Counter(left.bytes(dtype.itemsize) for layer, left in architecture.states if layer in layers)
    return [StateShape(stage=stage, count=count, token_bytes=size) for size, count in sizes.items()]


def _expert_shapes(architecture: Architecture, stage: int, layers: range) -> list[ExpertShape]:
    """One entry for alike experts in consecutive layers."""
    shapes: list[ExpertShape] = []
    for stack in architecture.experts:
        if stack.layer not in layers:
            continue
        own = ExpertShape(
            stage=stage,
            first_layer=stack.layer,
            count=1,
            experts=stack.experts,
            active=stack.active,
            width=stack.width,
            in_peft=stack.in_peft,
            path=stack.pattern if stack.gated else None,
            swapped=stack.swapped or None,
        )
        last = shapes[-1] if shapes else own
        if last == own.model_copy(update={"first_layer": stack.layer - last.count, "count": last.count}):
            shapes[-1] = last.model_copy(update={"count": last.count + 1})
        else:
            shapes.append(own)
    return shapes
