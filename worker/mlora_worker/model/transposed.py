"""Linear modules whose weights lie the other way round in the checkpoint (GPT-2's ``Conv1D``)."""

from __future__ import annotations

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D


class StoredTransposed(nn.Linear):
    """An ordinary linear module; files have its weight as [in, out]."""


def unify_linears(root: nn.Module) -> int:
    """Put a linear module in the place of each ``Conv1D`` below ``root``, which is on the meta device; returns how many."""
    found = [
        (parent, name, child)
        for parent in root.modules()
        for name, child in parent.named_children()
        if isinstance(child, Conv1D)
    ]
    for parent, name, child in found:
        inputs, outputs = child.weight.shape
        with torch.device(child.weight.device):
            setattr(parent, name, StoredTransposed(inputs, outputs, dtype=child.weight.dtype))
    return len(found)
