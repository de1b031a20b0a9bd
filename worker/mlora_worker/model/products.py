"""What multiplies with the frozen weights of a stage: chosen before any of them is read, and then loaded for it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch

from mlora_worker.frozen.choose import Chosen, choose, no_choice, plainly
from mlora_worker.frozen.linear import Freeze
from mlora_worker.frozen.quantised import QuantisedWeight
from mlora_worker.model.architecture import Architecture, read_architecture
from mlora_worker.model.facts import stage_layers, stage_shapes
from mlora_worker.model.load import load_stage
from mlora_worker.model.renamed import TensorSource
from mlora_worker.model.stage import Stage
from mlora_worker.stream.libraries import may_choose


def choose_products(
    folder: Path, stage: int, stages: int, dtype: torch.dtype, device: torch.device, budget: int | None
) -> Chosen:
    """For stage ``stage`` of ``stages`` of the model whose config.json is in ``folder``.

    ``budget``: bytes of the stage; None: no limit. Raises UnsupportedModel, TooManyStages.
    """
    why = no_choice(dtype, device)
    if why is not None:  # so the shapes are not looked at
        return plainly(why)
    (whole,) = stage_shapes(folder, 1, dtype)
    room = may_choose(whole.parameters, budget)
    return choose(_matrices(read_architecture(folder), stage, stages), dtype, device, room=room)


def load_with(
    chosen: Chosen,
    folder: Path,
    source: TensorSource,
    stage: int,
    stages: int,
    dtype: torch.dtype,
    device: torch.device,
    freeze: Freeze | None = None,
) -> Stage:
    """The stage, as ``load_stage`` has it, multiplied by the library that was chosen.

    ``freeze``: what makes the weights of the linear modules; None: that library's. Quantised matrices, which are dense for
    a pass, are multiplied by it as well.
    """
    loaded = load_stage(folder, source, stage, stages, dtype, device, freeze or chosen.freeze, chosen.freeze)
    for module in loaded.layers.modules():
        if isinstance(module, QuantisedWeight):
            module.library = chosen.name
    return loaded


def _matrices(architecture: Architecture, stage: int, stages: int) -> Counter[tuple[int, int]]:
    """[out, in] of the linear modules, the experts that a token goes through, and the head, with how many there are."""
    layers = stage_layers(architecture, stages)[stage]
    found = Counter(
        (linear.out_features, linear.in_features) for linear in architecture.linears if linear.layer in layers
    )
    for stack in architecture.experts:
        if stack.layer in layers:
            found.update({shape: stack.active * n for shape, n in Counter(stack.matrices).items()})
    if stage == stages - 1:
        found[architecture.vocab_size, architecture.hidden_size] += 1
    return found
