"""What others need to know of a base model, from its configuration alone; and the names of modules to
adapt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch

from mlora_worker.model.architecture import Architecture, Linear, read_architecture
from mlora_worker.model.errors import InvalidTarget, UnknownTargetModule
from mlora_worker.model.partition import split_layers
from mlora_worker.protocol import LoRAConfig, ModelFacts, ModuleShape

ALL_LINEAR = "all-linear"


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


def resolve_targets(facts: ModelFacts, lora: LoRAConfig) -> tuple[str, ...]:
    """The module names that ``lora`` adapts, each once, in the order of the model's layers.

    ``all-linear`` means every linear module of the decoder layers: never the head, never the embeddings.
    Raises UnknownTargetModule (an entry matches nothing in the whole model; the message has the real names)
    and InvalidTarget (``all-linear`` beside other names; a rank above the smaller side of a module, of which
    the excess could never be learnt).
    """
    known = tuple(dict.fromkeys(module.name for module in facts.modules))
    if ALL_LINEAR in lora.target_modules and len(set(lora.target_modules)) > 1:
        raise InvalidTarget(
            f"targetModules: {ALL_LINEAR} stands alone; remove the other names or {ALL_LINEAR}"
        )
    asked = known if lora.target_modules[0] == ALL_LINEAR else lora.target_modules
    unknown = [name for name in dict.fromkeys(asked) if name not in known]
    if unknown:
        raise UnknownTargetModule(
            f"targetModules: {', '.join(unknown)} is no linear module of the model's decoder layers; "
            f"there are {', '.join(known)} (or {ALL_LINEAR}); entries are names, not patterns"
        )
    targets = tuple(name for name in known if name in asked)
    for module in facts.modules:
        side = min(module.in_features, module.out_features)
        if module.name in targets and lora.rank > side:
            raise InvalidTarget(
                f"rank {lora.rank} is larger than the smaller side of {module.name} "
                f"({module.in_features} x {module.out_features}): use at most {side}"
            )
    return targets


def target_linears(architecture: Architecture, targets: Iterable[str]) -> tuple[Linear, ...]:
    """The linear modules of the whole model whose name is in ``targets`` (resolved names)."""
    wanted = frozenset(targets)
    return tuple(linear for linear in architecture.linears if linear.name in wanted)
