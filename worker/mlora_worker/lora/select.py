"""Which implementation of the low-rank products a device gets."""

from __future__ import annotations

import logging

import torch

from mlora_worker.lora.cpu import CpuProducts
from mlora_worker.lora.groups import Products

log = logging.getLogger(__name__)


def products_for(device: torch.device) -> Products:
    """Triton's kernels on CUDA, torch's own products on the CPU, and where there is no Triton."""
    if device.type == "cuda":
        try:
            from mlora_worker.lora.triton_products import TritonProducts
        except ImportError as error:
            log.warning("without Triton the launches grow with the number of tasks: %s", error)
        else:
            return TritonProducts()
    return CpuProducts()
