"""Triton kernels for what lies between a layer's products: norm, gated activation, rotary embedding.

Each goes through memory once where transformers' chains of operations go through it three to eight times. Numbers are read
and written in the base's type, and what lies between is float32. A row, or a token's heads, is one program's, and blocks
have fixed sizes: no result depends on the other tokens.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# The compiler takes an annotation for a name that the kernel uses, so what runs on the device has none.

from __future__ import annotations

import triton
import triton.language as tl

from mlora_worker.runtime.kernel_compiler import device_function

SILU, GELU, GELU_TANH = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_SQRT_HALF = tl.constexpr(0.7071067811865476)
_DENSITY = tl.constexpr(0.3989422804014327)  # 1 / sqrt(2 pi)
_TANH_SCALE = tl.constexpr(0.7978845608028654)  # sqrt(2 / pi)
_TANH_CUBIC = tl.constexpr(0.044715)


@triton.jit
def _add(a, b):
    return a + b


@triton.jit
def norm_kernel(
    x, weight, y, rescale, rows, size, epsilon,
    OFFSET: tl.constexpr, ROUND: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y = (OFFSET + weight) x / sqrt(mean(x^2) + epsilon). ROUND: to the base's type before the weight, too. Grid: (blocks
    of rows).
    """
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, BLOCK)
    valid = (r < rows)[:, None] & (c < size)[None, :]
    place = r[:, None].to(tl.int64) * size + c[None, :]
    own = tl.load(x + place, mask=valid, other=0.0).to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.reduce(own * own, 1, _add) / size + epsilon)
    tl.store(rescale + r, factor, mask=r < rows)
    scale = OFFSET + tl.load(weight + c, mask=c < size, other=0.0).to(tl.float32)
    own = own * factor[:, None]
    if ROUND:
        own = own.to(x.dtype.element_ty).to(tl.float32)
    tl.store(y + place, (own * scale[None, :]).to(y.dtype.element_ty), mask=valid)


@triton.jit
def norm_backward_kernel(
    x, weight, rescale, grad, grad_x, rows, size,
    OFFSET: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """With r = rescale and s = OFFSET + weight: grad_x = r (s g) - x r^3 mean(s g x). Grid: (blocks of rows)."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, BLOCK)
    valid = (r < rows)[:, None] & (c < size)[None, :]
    place = r[:, None].to(tl.int64) * size + c[None, :]
    own = tl.load(x + place, mask=valid, other=0.0).to(tl.float32)
    scale = OFFSET + tl.load(weight + c, mask=c < size, other=0.0).to(tl.float32)
    upstream = tl.load(grad + place, mask=valid, other=0.0).to(tl.float32) * scale[None, :]
    factor = tl.load(rescale + r, mask=r < rows, other=0.0)
    back = tl.reduce(upstream * own, 1, _add) / size * factor * factor * factor
    result = factor[:, None] * upstream - back[:, None] * own
    tl.store(grad_x + place, result.to(grad_x.dtype.element_ty), mask=valid)


@device_function
def _activate(gate, KIND: tl.constexpr):
    """The activation and its derivative."""
    if KIND == SILU:
        sigmoid = 1.0 / (1.0 + tl.exp(-gate))
        return gate * sigmoid, sigmoid * (1.0 + gate * (1.0 - sigmoid))
    if KIND == GELU:
        below = 0.5 * (1.0 + tl.erf(gate * _SQRT_HALF))
        return gate * below, below + gate * _DENSITY * tl.exp(-0.5 * gate * gate)
    inner = (gate + gate * gate * gate * _TANH_CUBIC) * _TANH_SCALE
    bent = 1.0 - 2.0 / (tl.exp(2.0 * inner) + 1.0)
    slope = (1.0 + gate * gate * (3.0 * _TANH_CUBIC)) * _TANH_SCALE
    return 0.5 * gate * (1.0 + bent), 0.5 * (1.0 + bent) + 0.5 * gate * (1.0 - bent * bent) * slope


@triton.jit
def gated_kernel(gate, up, y, stride, size, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """y = activation(gate) up; ``stride``: from row to row of gate and up. Grid: (blocks of a row, rows)."""
    c = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1).to(tl.int64)
    valid = c < size
    own = tl.load(gate + row * stride + c, mask=valid, other=0.0).to(tl.float32)
    active, _ = _activate(own, KIND)
    active = active.to(y.dtype.element_ty).to(tl.float32)  # as torch has it between the two operations
    other = tl.load(up + row * stride + c, mask=valid, other=0.0).to(tl.float32)
    tl.store(y + row * size + c, (active * other).to(y.dtype.element_ty), mask=valid)


@triton.jit
def gated_backward_kernel(
    gate, up, grad, grad_gate, grad_up, stride, size, KIND: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Computes the activation again. Grid: (blocks of a row, rows)."""
    c = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1).to(tl.int64)
    valid = c < size
    own = tl.load(gate + row * stride + c, mask=valid, other=0.0).to(tl.float32)
    other = tl.load(up + row * stride + c, mask=valid, other=0.0).to(tl.float32)
    upstream = tl.load(grad + row * size + c, mask=valid, other=0.0).to(tl.float32)
    active, slope = _activate(own, KIND)
    place = row * size + c
    tl.store(grad_up + place, (upstream * active).to(grad_up.dtype.element_ty), mask=valid)
    tl.store(grad_gate + place, (upstream * other * slope).to(grad_gate.dtype.element_ty), mask=valid)


@triton.jit
def rotary_kernel(
    q, k, rotated_q, rotated_k, cos, sin, q_token, q_head, k_token, k_head, q_heads, k_heads, size, rotated,
    BACKWARD: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """[y1, y2] = [x1 cos1 - x2 sin1, x2 cos2 + x1 sin2] of the halves of each head's first ``rotated`` numbers; the rest
    is copied. BACKWARD: the transposed map. ``*_token``, ``*_head``: strides of q and k. Grid: (tokens, blocks of q's
    heads and of k's).
    """
    token = tl.program_id(0).to(tl.int64)
    of_q = (q_heads + HEADS - 1) // HEADS
    block = tl.program_id(1)
    is_q = block < of_q
    heads = tl.where(is_q, q_heads, k_heads)
    h = tl.where(is_q, block, block - of_q) * HEADS + tl.arange(0, HEADS)
    source = tl.where(is_q, q, k) + token * tl.where(is_q, q_token, k_token)
    source += h[:, None].to(tl.int64) * tl.where(is_q, q_head, k_head)
    target = tl.where(is_q, rotated_q, rotated_k) + (token * heads + h[:, None]) * size
    half = rotated // 2
    c = tl.arange(0, HALF)
    mine = c < half
    cos1 = tl.load(cos + token * rotated + c, mask=mine, other=0.0).to(tl.float32)[None, :]
    cos2 = tl.load(cos + token * rotated + half + c, mask=mine, other=0.0).to(tl.float32)[None, :]
    sin1 = tl.load(sin + token * rotated + c, mask=mine, other=0.0).to(tl.float32)[None, :]
    sin2 = tl.load(sin + token * rotated + half + c, mask=mine, other=0.0).to(tl.float32)[None, :]
    valid = (h < heads)[:, None] & mine[None, :]
    x1 = tl.load(source + c[None, :], mask=valid, other=0.0).to(tl.float32)
    x2 = tl.load(source + half + c[None, :], mask=valid, other=0.0).to(tl.float32)
    if BACKWARD:
        y1 = x1 * cos1 + x2 * sin2
        y2 = x2 * cos2 - x1 * sin1
    else:
        y1 = x1 * cos1 - x2 * sin1
        y2 = x2 * cos2 + x1 * sin2
    tl.store(target + c[None, :], y1.to(q.dtype.element_ty), mask=valid)
    tl.store(target + half + c[None, :], y2.to(q.dtype.element_ty), mask=valid)
    if REST > 0:
        rest = rotated + tl.arange(0, REST)
        valid = (h < heads)[:, None] & (rest < size)[None, :]
        tl.store(target + rest[None, :], tl.load(source + rest[None, :], mask=valid, other=0.0), mask=valid)
