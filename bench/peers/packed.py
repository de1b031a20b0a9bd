"""A run of TRL with its fast options, for each task, one task after the other: padding-free rows, loss on supervised
tokens only, bf16 autocast on a bf16 base.

What was taken from TRL 1.16 (``SFTConfig``), and what it is spared here, is in docs/contributors/benchmarks.md.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from bench.peers.adapters import PeftTasks
from bench.rows import Batch, pack
from bench.sides import Setting
from mlora_worker.data.prepare import IGNORED

ATTENTION = "bench_by_row"


def attention_by_row(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    boundaries: tuple[int, ...],
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface; what variable-length flash attention is on a GPU.

    query [1, heads, tokens, size], key and value [1, key heads, tokens, size]; row i lies from ``boundaries[i]`` to
    ``boundaries[i + 1]``. Returns [1, tokens, heads, size].
    """
    del module, attention_mask
    rows = [stop - start for start, stop in pairwise(boundaries)]
    parts = zip(*(torch.split(part, rows, dim=2) for part in (query, key, value)), strict=True)
    outs = [
        scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
        for q, k, v in parts
    ]
    return torch.cat(outs, dim=2).transpose(1, 2), None


def _no_mask(*_: Any, **__: Any) -> None:
    return None


AttentionInterface.register(ATTENTION, attention_by_row)
AttentionMaskInterface.register(ATTENTION, _no_mask)


class Packed(PeftTasks):
    name = "packed"

    def __init__(self, base: Any, setting: Setting) -> None:
        super().__init__(base, setting, ATTENTION)
        self._half = base.dtype is torch.bfloat16

    def step(self, batch: Batch, learning_rate: float) -> list[float]:
        losses = []
        for model, optimizer, rows in zip(self.models, self.optimizers, batch.rows, strict=True):
            packed = pack(rows)
            with torch.autocast("cpu", torch.bfloat16, enabled=self._half):
                causal = model.get_base_model()
                hidden = causal.model(
                    input_ids=packed.ids[None],
                    position_ids=packed.positions[None],
                    boundaries=packed.boundaries,
                    use_cache=False,
                ).last_hidden_state[0]
                supervised = packed.targets != IGNORED
                logits = causal.lm_head(hidden[supervised])
            loss = cross_entropy(logits.float(), packed.targets[supervised])
            torch.autograd.backward(loss)
            optimizer.step(learning_rate)
            losses.append(loss.item())
        return losses
