"""Copies to the device that nobody waits for."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` on ``device``. From host to GPU through page-locked memory: an ordinary copy would stop this thread
    until the GPU has done all that is queued.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
