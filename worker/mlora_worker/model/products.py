"""What multiplies with the frozen weights of a stage, before any of them is read."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch

from mlora_worker.frozen.choose import Chosen, choose
from mlora_worker.frozen.linear import Freeze
from mlora_worker.frozen.onednn import OneDnnWeight
from mlora_worker.frozen.plain import PlainWeight
from mlora_worker.frozen.quantised import QuantisedWeight
from mlora_worker.model.architecture import Architecture, read_architecture
from mlora_worker.model.facts import stage_layers, stage_shapes
from mlora_worker.model.stage import Stage
from mlora_worker.stream.libraries import may_choose


def choose_products(
    folder: Path, stage: int, stages: int, dtype: torch.dtype, device: torch.device, budget: int | None
) -> Chosen:
    """For stage ``stage`` of ``stages`` of the model whose config.json is in ``folder``.

    ``budget``: bytes of the stage; None: no limit. Raises UnsupportedModel, TooManyStages.
    """
    shape = stage_shapes(folder, stages, dtype)[stage]
    room = may_choose(shape.parameters, budget)
    return choose(_matrices(read_architecture(folder), stage, stages), dtype, device, room=room)


def multiply_by(stage: Stage, chosen: Chosen) -> None:
    """Let the quantised matrices of ``stage`` be multiplied by the library that was chosen."""
    for linear in stage.linears.values():
        if isinstance(linear.weight, QuantisedWeight):
            linear.weight.library = chosen.name


def head_of(chosen: Chosen) -> Freeze:
    """What makes the head of a quantised base, which takes no more than its plain bytes."""
    return OneDnnWeight if chosen.name == OneDnnWeight.library else PlainWeight


def _matrices(architecture: Architecture, stage: int, stages: int) -> Counter[tuple[int, int]]:
    """[out, in] of the linear modules and the head, with how many there are."""
    layers = stage_layers(architecture, stages)[stage]
    found = Counter(
        (linear.out_features, linear.in_features) for linear in architecture.linears if linear.layer in layers
    )
    if stage == stages - 1:
        found[architecture.vocab_size, architecture.hidden_size] += 1
    return found
