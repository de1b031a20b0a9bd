"""Which fused modules a device gets in the place of transformers' norms, feed-forwards and rotary embeddings."""

from __future__ import annotations

import torch
from torch import nn

from mlora_worker.model.fused import fuse as fuse_on_cpu
from mlora_worker.runtime.kernel_compiler import missing_for_triton


def fuse(layers: nn.Module, device: torch.device) -> int:
    """Replace what has an equal below ``layers``, whose weights lie on ``device``; returns how many modules."""
    if device.type != "cuda":
        return fuse_on_cpu(layers)
    if missing_for_triton() is not None:  # the log says so once, where the low-rank products are chosen
        return 0
    from mlora_worker.model.fused_on_gpu import fuse_on_gpu

    return fuse_on_gpu(layers)
