"""The Triton kernel of a causal convolution over packed rows, each channel by itself.

A number is one program's, and its taps are added in one order in float32, so it depends on its own row's last tokens alone,
to the bit. ``place`` [tokens] says how many tokens of the same row come before each.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# The compiler takes an annotation for a name that the kernel uses, so what runs on the device has none.

from __future__ import annotations

import triton
import triton.language as tl

FORWARD, BACK_TO_SUM, BACK_TO_INPUT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def convolution_kernel(
    x, weight, bias, grad, y, place, stride, tokens, channels,
    KIND: tl.constexpr, TAPS: tl.constexpr, SILU: tl.constexpr, BIASED: tl.constexpr,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """FORWARD: y = f(s), s = bias + sum over j of weight[TAPS - 1 - j] x[t - j]; f: silu, or nothing.
    BACK_TO_SUM: y = grad f'(s). BACK_TO_INPUT: y = sum over j of weight[TAPS - 1 - j] x[t + j], where x is the former's y.

    weight [channels, TAPS]; ``stride``: from token to token of x. Grid: (blocks of tokens, blocks of channels).
    """
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    own = (t < tokens)[:, None] & (c < channels)[None, :]
    total = tl.full([TOKENS, CHANNELS], 0.0, tl.float32)
    if BIASED:
        total += tl.load(bias + c, mask=c < channels, other=0.0).to(tl.float32)[None, :]
    before = tl.load(place + t, mask=t < tokens, other=0)
    for j in tl.static_range(TAPS):
        if KIND == BACK_TO_INPUT:
            # The token that lies j further is of the same row if as many of its row come before it.
            other = t + j
            there = (other < tokens) & (tl.load(place + other, mask=other < tokens, other=0) >= j)
        else:
            other = t - j
            there = (t < tokens) & (before >= j)
        tap = tl.load(weight + c * TAPS + (TAPS - 1 - j), mask=c < channels, other=0.0).to(tl.float32)
        seen = there[:, None] & (c < channels)[None, :]
        total += tap[None, :] * tl.load(x + other[:, None] * stride + c[None, :], mask=seen, other=0.0).to(
            tl.float32
        )
    target = t[:, None] * channels + c[None, :]
    if KIND != BACK_TO_INPUT and SILU:
        total = total.to(y.dtype.element_ty).to(tl.float32)  # as torch has it between the two operations
        sigmoid = 1.0 / (1.0 + tl.exp(-total))
        if KIND == FORWARD:
            total = total * sigmoid
        else:
            total = sigmoid * (1.0 + total * (1.0 - sigmoid))
            total = total * tl.load(grad + target, mask=own, other=0.0).to(tl.float32)
    tl.store(y + target, total.to(y.dtype.element_ty), mask=own)
