"""A mixture's experts with adapters, in plain torch, for vLLM on a CPU: its own build has a kernel for this on GPUs alone.

All else is vLLM's: which adapters it accepts, what it makes of their tensors, into which buffers it writes them, and which
token has which adapter. The sums are those that the kernel documents: for each chosen expert,
``w2 (act(w13 x + B13 A13 x)) + B2 A2 (...)``, with the scale inside B already.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts


def install() -> None:
    """Before a model is loaded."""
    TritonExperts.apply = _apply


def _apply(
    self: Any,
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: MoEActivation,
    *_: Any,
    **__: Any,
) -> None:
    context = self._lora_context
    slots = context.punica_wrapper.token_lora_indices
    made = torch.zeros(hidden_states.shape, dtype=torch.float32)
    for token, chosen in enumerate(topk_ids.tolist()):
        slot = int(slots[token]) if token < len(slots) else -1
        has = slot >= 0 and bool(context.adapter_enabled[slot])
        for place, expert in enumerate(chosen):
            x = hidden_states[token]
            inner = w1[expert] @ x
            if self.w1_bias is not None:
                inner = inner + self.w1_bias[expert]
            if has:
                inner = inner + _both(context, slot, expert, x, activation)
            middle = _activated(inner, activation)
            outer = w2[expert] @ middle
            if self.w2_bias is not None:
                outer = outer + self.w2_bias[expert]
            if has:
                a, b = context.w2_lora_a_stacked[0][slot, expert], context.w2_lora_b_stacked[0][slot, expert]
                outer = outer + b @ (a @ middle)
            made[token] += float(topk_weights[token, place]) * outer
    output.copy_(made)


def _both(context: Any, slot: int, expert: int, x: torch.Tensor, activation: MoEActivation) -> torch.Tensor:
    """What an adapter adds to gate and up, in the order that the base's own have."""
    halves = [
        b[slot, expert] @ (a[slot, expert] @ x)
        for a, b in zip(context.w13_lora_a_stacked, context.w13_lora_b_stacked, strict=True)
    ]
    in_turns = len(halves) == 2 and activation is MoEActivation.SWIGLUOAI
    return torch.stack(halves, dim=-1).flatten() if in_turns else torch.cat(halves)


def _activated(inner: torch.Tensor, activation: MoEActivation) -> torch.Tensor:
    if activation is MoEActivation.SWIGLUOAI:
        gate, up = inner[::2].clamp(max=7.0), inner[1::2].clamp(-7.0, 7.0)
        return (up + 1) * gate * torch.sigmoid(1.702 * gate)
    assert activation is MoEActivation.SILU, activation
    gate, up = inner.chunk(2)
    return functional.silu(gate) * up
