"""A causal convolution over packed rows in one kernel, forward, and in one or two backward. Kept is its input."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mlora_worker.model.attention import PackedRows
from mlora_worker.model.recurrent import triton_convolution as kernels
from mlora_worker.runtime.kernel_compiler import Launch

TOKENS, CHANNELS, WARPS = 8, 128, 4  # of a program


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, rows: PackedRows, silu: bool, launch: Launch
) -> Tensor:
    """x [1, tokens, channels], weight [channels, taps], bias [channels] -> as x: of each channel the sum over its last
    tokens, with nothing before the first of a row; ``silu``: of that. Weight and bias are frozen."""
    y: Tensor = _Convolution.apply(x, weight.contiguous(), bias, rows.position_ids, silu, launch)
    return y


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, place: Tensor, silu: bool, launch: Launch
    ) -> Tensor:
        if x.stride(2) != 1:
            x = x.contiguous()
        ctx.save_for_backward(x, weight, bias, place)
        ctx.silu, ctx.launch = silu, launch
        return _started(kernels.FORWARD.value, x, weight, bias, None, place, silu, launch)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, place = ctx.saved_tensors
        grad = grads[0].contiguous()
        if ctx.silu:
            grad = _started(kernels.BACK_TO_SUM.value, x, weight, bias, grad, place, True, ctx.launch)
        grad_x = _started(kernels.BACK_TO_INPUT.value, grad, weight, None, None, place, False, ctx.launch)
        return grad_x, None, None, None, None, None


def _started(
    kind: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    grad: Tensor | None,
    place: Tensor,
    silu: bool,
    launch: Launch,
) -> Tensor:
    _, tokens, channels = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if tokens:
        launch(
            kernels.convolution_kernel, (-(-tokens // TOKENS), -(-channels // CHANNELS)),
            x, weight, weight if bias is None else bias, x if grad is None else grad, y, place,
            x.stride(1), tokens, channels,
            KIND=kind, TAPS=weight.shape[1], SILU=silu, BIASED=bias is not None,
            TOKENS=TOKENS, CHANNELS=CHANNELS, num_warps=WARPS,
        )  # fmt: skip
    return y
