"""Norm, gated activation and rotary embedding by the kernels of ``triton_elementwise``, with their backward passes.

What is kept for a backward is what lies in memory anyway: the input of a norm and a number a row, gate and up, and the
cosines and sines that all layers share.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton import next_power_of_2

from mlora_worker.model import triton_elementwise as kernels
from mlora_worker.runtime.kernel_compiler import Launch

MOST_SIZE = 32_768  # of a norm's row, which one program holds
NORM_BLOCK = 4096  # numbers that a program holds, where a row has fewer
_NARROW_WARPS, _WIDE_WARPS = 4, 8
GATED_BLOCK = 1024
HEADS = 16  # that a program rotates


class RMSNorm(torch.autograd.Function):
    """``(offset + weight) x / sqrt(mean(x^2) + epsilon)`` of each row; ``rounds``: also before the weight, to x's type."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, epsilon: float, offset: float, rounds: bool, launch: Launch
    ) -> Tensor:
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        y, rescale = torch.empty_like(flat), flat.new_empty(len(flat), dtype=torch.float32)
        block, rows = norm_blocks(flat.shape[1])
        if len(flat):
            launch(
                kernels.norm_kernel, (-(-len(flat) // rows),),
                flat, weight, y, rescale, *flat.shape, epsilon,
                OFFSET=offset, ROUND=rounds, ROWS=rows, BLOCK=block, num_warps=norm_warps(block),
            )  # fmt: skip
        ctx.save_for_backward(flat, weight, rescale)
        ctx.offset, ctx.launch = offset, launch
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        flat, weight, rescale = ctx.saved_tensors
        grad = grads[0].reshape(flat.shape).contiguous()
        grad_x = torch.empty_like(flat)
        block, rows = norm_blocks(flat.shape[1])
        if len(flat):
            ctx.launch(
                kernels.norm_backward_kernel, (-(-len(flat) // rows),),
                flat, weight, rescale, grad, grad_x, *flat.shape,
                OFFSET=ctx.offset, ROWS=rows, BLOCK=block, num_warps=norm_warps(block),
            )  # fmt: skip
        return grad_x.view(grads[0].shape), None, None, None, None, None


class Gated(torch.autograd.Function):
    """``activation(gate) * up``; ``kind``: which activation."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kind: int, launch: Launch) -> Tensor:
        if _row_stride(gate) is None or _row_stride(gate) != _row_stride(up):
            gate, up = gate.contiguous(), up.contiguous()
        y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        if y.numel():
            size, stride, grid = _gated_grid(gate)
            launch(
                kernels.gated_kernel, grid, gate, up, y, stride, size,
                KIND=kind, BLOCK=GATED_BLOCK, num_warps=_NARROW_WARPS,
            )  # fmt: skip
        ctx.save_for_backward(gate, up)
        ctx.kind, ctx.launch = kind, launch
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        grad = grads[0].contiguous()
        grad_gate, grad_up = torch.empty_like(grad), torch.empty_like(grad)
        if grad.numel():
            size, stride, grid = _gated_grid(gate)
            ctx.launch(
                kernels.gated_backward_kernel, grid, gate, up, grad, grad_gate, grad_up, stride, size,
                KIND=ctx.kind, BLOCK=GATED_BLOCK, num_warps=_NARROW_WARPS,
            )  # fmt: skip
        return grad_gate, grad_up, None, None


class Rotary(torch.autograd.Function):
    """q [1, heads, tokens, size] and k [1, key heads, tokens, size], rotated; cos and sin [1, tokens, rotated]."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, launch: Launch
    ) -> tuple[Tensor, Tensor]:
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        ctx.launch = launch
        return _rotate(q, k, cos, sin, launch, backward=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_q, grad_k), (cos, sin) = grads, ctx.saved_tensors
        return *_rotate(grad_q, grad_k, cos, sin, ctx.launch, backward=True), None, None, None


def _rotate(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, launch: Launch, *, backward: bool
) -> tuple[Tensor, Tensor]:
    """Results lie token by token, as attention and the products want them."""
    q, k = (one if one.stride(3) == 1 else one.contiguous() for one in (q, k))
    (_, q_heads, tokens, size), k_heads, rotated = q.shape, k.shape[1], cos.shape[-1]
    outs = [one.new_empty(1, tokens, one.shape[1], size) for one in (q, k)]
    if tokens:
        launch(
            kernels.rotary_kernel, (tokens, -(-q_heads // HEADS) - (-k_heads // HEADS)),
            q, k, *outs, cos, sin, q.stride(2), q.stride(1), k.stride(2), k.stride(1), q_heads, k_heads, size, rotated,
            BACKWARD=backward, HEADS=HEADS, HALF=next_power_of_2(rotated // 2),
            REST=next_power_of_2(size - rotated) if size > rotated else 0, num_warps=_NARROW_WARPS,
        )  # fmt: skip
    return outs[0].transpose(1, 2), outs[1].transpose(1, 2)


def norm_blocks(size: int) -> tuple[int, int]:
    """Numbers of a row of ``size`` that a program holds, and rows."""
    block: int = next_power_of_2(size)
    return block, max(1, NORM_BLOCK // block)


def norm_warps(block: int) -> int:
    return _WIDE_WARPS if block > NORM_BLOCK else _NARROW_WARPS


def _row_stride(tensor: Tensor) -> int | None:
    """Of rows that lie equally far apart; None where they do not."""
    flat = tensor.view(-1, tensor.shape[-1]) if tensor.is_contiguous() else tensor.squeeze(0)
    return flat.stride(0) if flat.ndim == 2 and flat.stride(1) == 1 else None


def _gated_grid(gate: Tensor) -> tuple[int, int, tuple[int, int]]:
    """Columns, stride and grid. What has no gaps is one row."""
    if gate.is_contiguous():
        return gate.numel(), 0, (-(-gate.numel() // GATED_BLOCK), 1)
    size = gate.shape[-1]
    stride = _row_stride(gate)
    assert stride is not None
    return size, stride, (-(-size // GATED_BLOCK), gate.numel() // size)
