"""What the file of an adapter must hold. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from mlora_worker.lora.adapter import peft_keys
from mlora_worker.stream.targets import Target


def expected_tensors(targets: Iterable[Target]) -> dict[str, tuple[int, int]]:
    """Name and shape of each tensor in the file of an adapter on ``targets``, which are of the whole model."""
    shapes = {}
    for target in targets:
        name_a, name_b = peft_keys(target.path)
        shapes[name_a] = (target.rank, target.module.in_features)
        shapes[name_b] = (target.module.out_features, target.rank)
    return shapes
