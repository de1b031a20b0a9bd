"""Half-precision models on processors that cannot multiply half-precision numbers.

There, torch's bfloat16 products run at about an eighth of float32's speed. So the products of such a model are taken in
float32, and results are rounded to the model's type once, after the low-rank products were added: weights and activations
keep their size and their values, sums are better rounded.
"""

from __future__ import annotations

from functools import cache

import torch

_HALVES = (torch.bfloat16, torch.float16)


def product_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The type in which products of ``dtype`` are taken on ``device``."""
    if dtype in _HALVES and device.type == "cpu" and not _multiplies_halves(dtype):
        return torch.float32
    return dtype


@cache
def _multiplies_halves(dtype: torch.dtype) -> bool:
    """What torch's own matrix library says of this processor."""
    name = "_is_mkldnn_bf16_supported" if dtype == torch.bfloat16 else "_is_mkldnn_fp16_supported"
    asked = getattr(torch.ops.mkldnn, name, None)
    return True if asked is None else bool(asked())
