"""What the file of an adapter must hold. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from mlora_worker.lora.adapter import magnitude_key, peft_keys
from mlora_worker.lora.vera import PROJECTION_KEYS, projections, vera_keys
from mlora_worker.protocol import AdapterType, LoRAConfig
from mlora_worker.stream.targets import Target, widest


def expected_tensors(targets: Iterable[Target]) -> dict[str, tuple[int, ...]]:
    """Name and shape of each tensor that is trained of an adapter on ``targets``, which are of the whole model: all that
    its file has, but for VeRA's random matrices."""
    shapes: dict[str, tuple[int, ...]] = {}
    for target in targets:
        if target.vera:
            inward, outward = vera_keys(target.path)
            shapes[inward], shapes[outward] = (target.rank,), (target.module.out_features,)
            continue
        name_a, name_b = peft_keys(target.file_path)
        shapes[name_a] = (target.rows, target.module.in_features)
        shapes[name_b] = (target.module.out_features, target.rows)
        if target.dora:
            shapes[magnitude_key(target.path)] = (target.module.out_features,)
    return shapes


def random_matrices(lora: LoRAConfig, seed: int, targets: Sequence[Target]) -> dict[str, Tensor]:
    """What VeRA's file has beside them, so that it is whole wherever it is read; none for other adapters."""
    if lora.type is not AdapterType.VERA:
        return {}
    return dict(zip(PROJECTION_KEYS, projections(seed, lora.rank, *widest(targets)), strict=True))
