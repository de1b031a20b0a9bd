"""Which implementation of the low-rank products a device gets."""

from __future__ import annotations

import logging

import torch

from mlora_worker.lora.cpu import CpuProducts
from mlora_worker.lora.groups import Products
from mlora_worker.runtime.kernel_compiler import missing_for_triton

log = logging.getLogger(__name__)


def products_for(device: torch.device) -> Products:
    """Triton's kernels on CUDA, torch's own products on the CPU, and where Triton cannot compile."""
    if device.type == "cuda":
        missing = missing_for_triton()
        if missing is None:
            from mlora_worker.lora.triton_products import TritonProducts

            return TritonProducts()
        log.warning(
            "kernel launches grow with the number of tasks, because Triton cannot compile kernels: %s",
            missing,
        )
        return CpuProducts(rows_per_block=None)
    return CpuProducts()
