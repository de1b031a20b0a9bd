"""What the file of an adapter must hold. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from mlora_worker.lora.adapter import magnitude_key, peft_keys
from mlora_worker.stream.targets import Target


def expected_tensors(targets: Iterable[Target]) -> dict[str, tuple[int, ...]]:
    """Name and shape of each tensor in the file of an adapter on ``targets``, which are of the whole model."""
    shapes: dict[str, tuple[int, ...]] = {}
    for target in targets:
        name_a, name_b = peft_keys(target.path)
        shapes[name_a] = (target.rank, target.module.in_features)
        shapes[name_b] = (target.module.out_features, target.rank)
        if target.dora:
            shapes[magnitude_key(target.path)] = (target.module.out_features,)
    return shapes
