"""Triton kernels for the low-rank products of all segments of a packed microbatch on one input group.

Every kernel is launched once for all segments and all members of the group; a program finds its segment in the tables
(``triton_tables``). What differs between segments (rank, targets, factor, dropout) is read there, so no kernel is compiled
anew for another mix of tasks. Additions within a segment are made in an order that depends on the segment alone, and
nothing is added atomically: a result is the same, bit for bit, beside any neighbours and in every run.

Words: *slab*, the columns of one member in the low-rank activations (``triton_tables``); *strip*, the columns of one
member's output, or of the input, cut into blocks. Suffixes of blocks: T tokens, C columns of a slab, W wide columns (of
an output or of the input).

A sum over a long input or output is taken in *spans* of fixed length, each by a program of its own, so that few tokens are
work for many processors; ``add_spans_kernel`` adds them one after the other. The length alone decides whether a sum is
split.

Products take float32 at full precision (no tf32) and half precision as it is; all sums are float32.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# The compiler takes an annotation for a name that the kernel uses, so what runs on the device has none.

from __future__ import annotations

import triton
import triton.language as tl

from mlora_worker.lora.triton_parts import (
    CHUNKS,
    COLUMNS,
    FACTOR,
    FIRST_ROW,
    GRAD_A,
    GRAD_B,
    INPUT,
    LOW,
    PARTIAL,
    PARTIAL_B,
    PARTIAL_STEP,
    RANK,
    RANK_TILE,
    SLABS,
    SLOT,
    STRENGTH,
    THRESHOLD,
    A,
    B,
    find_place,
    find_strip,
    keep,
    load_address,
    load_integer,
    load_offset,
    load_rank,
    load_real,
    mix_row_keys,
    multiply,
    pick,
    rows_of_a,
    slab_of,
)
from mlora_worker.runtime.kernel_compiler import device_function


@triton.jit
def low_kernel(
    x, low, sums, table, tiles, token_keys, feature_keys, inputs, elements,
    T: tl.constexpr, C: tl.constexpr, W: tl.constexpr, SPAN: tl.constexpr,
    MASKED: tl.constexpr, SPLIT: tl.constexpr, ALIGNED: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """low = mask(x) A^T of all slabs. Grid: (blocks of columns, tiles, SPLIT: spans). SPLIT: each span's sum goes to
    ``sums`` [spans, elements of low].
    """
    row, first, ordinal, end = find_place(table, tiles, tl.program_id(1), T)
    rank = load_integer(row, RANK)
    slab = slab_of(rank)
    width = slab * load_integer(row, SLABS)
    c = tl.program_id(0) * C + tl.arange(0, C)
    if tl.program_id(0) * C >= width:
        return
    t = first + tl.arange(0, T)
    t_valid = t < end
    a_rows, c_valid = rows_of_a(c, rank, slab)
    c_valid &= c < width
    a = load_address(row, A, x.dtype.element_ty, ALIGNED)
    threshold = load_integer(row, THRESHOLD)
    if MASKED:
        row_keys = mix_row_keys(token_keys, row, t, t_valid)
    place = load_offset(row, LOW) + (ordinal * T + tl.arange(0, T))[:, None].to(tl.int64) * width + c[None, :]
    valid = t_valid[:, None] & (c < width)[None, :]
    begin, stop = 0, inputs
    if SPLIT:
        begin = tl.program_id(2) * SPAN
        stop = tl.minimum(begin + SPAN, inputs)
    total = tl.full((T, C), 0.0, tl.float32)
    for start in range(begin, stop, W):
        w = start + tl.arange(0, W)
        w_valid = w < inputs
        own = tl.load(
            x + t[:, None].to(tl.int64) * inputs + w[None, :],
            mask=t_valid[:, None] & w_valid[None, :],
            other=0.0,
        )
        if MASKED:
            own = keep(own, row_keys, tl.load(feature_keys + w, mask=w_valid, other=1), threshold)
        factor = tl.load(
            a + a_rows[None, :].to(tl.int64) * inputs + w[:, None],
            mask=c_valid[None, :] & w_valid[:, None],
            other=0.0,
        )
        total = multiply(own, factor, total, WIDEN)
    if SPLIT:
        tl.store(sums + tl.program_id(2).to(tl.int64) * elements + place, total, mask=valid)
    else:
        tl.store(low + place, total.to(low.dtype.element_ty), mask=valid)


@triton.jit
def add_spans_kernel(sums, low, elements, spans, BLOCK: tl.constexpr):
    """low = the sum over spans, one after the other. Grid: (blocks of low's elements)."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.full((BLOCK,), 0.0, tl.float32)
    for span in range(spans):
        total += tl.load(sums + place + tl.cast(span, tl.int64) * elements, mask=place < elements, other=0.0)
    tl.store(low + place, total.to(low.dtype.element_ty), mask=place < elements)


@triton.jit
def output_kernel(
    low, y0, y1, y2, y3, n0, n1, n2, n3, table, tiles,
    T: tl.constexpr, W: tl.constexpr, VECTOR: tl.constexpr, ALIGNED: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """y += factor * low B^T of all members. Grid: (tiles, blocks of all outputs)."""
    row, first, ordinal, end = find_place(table, tiles, tl.program_id(0), T)
    member, first_column = find_strip(tl.program_id(1), n0, n1, n2, n3, W)
    slot = tl.load(row + SLOT + member).to(tl.int32)
    if slot < 0:
        return
    y, outputs = pick(member, y0, y1, y2, y3), pick(member, n0, n1, n2, n3)
    rank = load_rank(row, VECTOR)
    slab = slab_of(rank)
    width = slab * load_integer(row, SLABS)
    b = load_address(row, B + member, y0.dtype.element_ty, ALIGNED)
    t = first + tl.arange(0, T)
    t_valid = t < end
    w = first_column + tl.arange(0, W)
    w_valid = w < outputs
    rows = (ordinal * T + tl.arange(0, T)).to(tl.int64)
    own = low + load_offset(row, LOW) + rows * width + slot * slab
    total = tl.full((T, W), 0.0, tl.float32)
    for start in range(0, slab, RANK_TILE):
        c = start + tl.arange(0, RANK_TILE)
        left = tl.load(own[:, None] + c[None, :], mask=t_valid[:, None], other=0.0)
        right = tl.load(
            b + w[None, :].to(tl.int64) * rank + c[:, None],
            mask=(c < rank)[:, None] & w_valid[None, :],
            other=0.0,
        )
        total = multiply(left, right, total, WIDEN)
    place = y + t[:, None].to(tl.int64) * outputs + w[None, :]
    valid = t_valid[:, None] & w_valid[None, :]
    base = tl.load(place, mask=valid, other=0.0).to(tl.float32)
    tl.store(place, (base + load_real(row, FACTOR) * total).to(y0.dtype.element_ty), mask=valid)


@triton.jit
def grad_low_kernel(
    g0, g1, g2, g3, n0, n1, n2, n3, grad_low, sums, table, tiles, blocks, elements,
    T: tl.constexpr, C: tl.constexpr, W: tl.constexpr, SPAN: tl.constexpr,
    SPLIT: tl.constexpr, VECTOR: tl.constexpr, ALIGNED: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """grad_low = grad_y B of all members. Grid: (``blocks`` of a slab, SPLIT: times spans; members, tiles). SPLIT: as in
    ``low_kernel``; a member that has no such span adds zeros.
    """
    row, first, ordinal, end = find_place(table, tiles, tl.program_id(2), T)
    member = tl.program_id(1)
    slot = tl.load(row + SLOT + member).to(tl.int32)
    rank = load_rank(row, VECTOR)
    slab = slab_of(rank)
    block, number = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    if (slot < 0) | (block * C >= slab):
        return
    grad, outputs = pick(member, g0, g1, g2, g3), pick(member, n0, n1, n2, n3)
    width = slab * load_integer(row, SLABS)
    b = load_address(row, B + member, g0.dtype.element_ty, ALIGNED)
    t = first + tl.arange(0, T)
    t_valid = t < end
    c = block * C + tl.arange(0, C)
    begin, stop = 0, outputs
    if SPLIT:
        begin = number * SPAN
        stop = tl.minimum(begin + SPAN, outputs)
    total = tl.full((T, C), 0.0, tl.float32)
    for start in range(begin, stop, W):
        w = start + tl.arange(0, W)
        w_valid = w < outputs
        left = tl.load(
            grad + t[:, None].to(tl.int64) * outputs + w[None, :],
            mask=t_valid[:, None] & w_valid[None, :],
            other=0.0,
        )
        right = tl.load(
            b + w[:, None].to(tl.int64) * rank + c[None, :],
            mask=w_valid[:, None] & (c < rank)[None, :],
            other=0.0,
        )
        total = multiply(left, right, total, WIDEN)
    rows = (ordinal * T + tl.arange(0, T)).to(tl.int64)
    place = load_offset(row, LOW) + rows[:, None] * width + slot * slab + c[None, :]
    valid = t_valid[:, None] & (c < slab)[None, :]
    if SPLIT:
        tl.store(sums + number.to(tl.int64) * elements + place, total, mask=valid)
    else:
        tl.store(grad_low + place, total.to(g0.dtype.element_ty), mask=valid)


@triton.jit
def grad_input_kernel(
    grad_low, grad_x, table, tiles, token_keys, feature_keys, inputs,
    T: tl.constexpr, W: tl.constexpr, MASKED: tl.constexpr, ALIGNED: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """grad_x += factor * mask(grad_low A). Grid: (tiles, blocks of the input)."""
    row, first, ordinal, end = find_place(table, tiles, tl.program_id(0), T)
    rank = load_integer(row, RANK)
    slab = slab_of(rank)
    width = slab * load_integer(row, SLABS)
    a = load_address(row, A, grad_x.dtype.element_ty, ALIGNED)
    t = first + tl.arange(0, T)
    t_valid = t < end
    w = tl.program_id(1) * W + tl.arange(0, W)
    w_valid = w < inputs
    rows = (ordinal * T + tl.arange(0, T)).to(tl.int64)
    own = grad_low + load_offset(row, LOW) + rows * width
    total = tl.full((T, W), 0.0, tl.float32)
    for start in range(0, width, RANK_TILE):
        c = start + tl.arange(0, RANK_TILE)
        a_rows, c_valid = rows_of_a(c, rank, slab)
        left = tl.load(own[:, None] + c[None, :], mask=t_valid[:, None], other=0.0)
        right = tl.load(
            a + a_rows[:, None].to(tl.int64) * inputs + w[None, :],
            mask=c_valid[:, None] & w_valid[None, :],
            other=0.0,
        )
        total = multiply(left, right, total, WIDEN)
    if MASKED:
        row_keys = mix_row_keys(token_keys, row, t, t_valid)
        total = keep(
            total, row_keys, tl.load(feature_keys + w, mask=w_valid, other=1), load_integer(row, THRESHOLD)
        )
    place = grad_x + t[:, None].to(tl.int64) * inputs + w[None, :]
    valid = t_valid[:, None] & w_valid[None, :]
    base = tl.load(place, mask=valid, other=0.0).to(tl.float32)
    tl.store(place, (base + load_real(row, FACTOR) * total).to(grad_x.dtype.element_ty), mask=valid)


@device_function
def _sum_over_tokens(
    narrow, narrow_stride, c, c_valid, wide, wide_stride, w, w_valid, narrow_first, first, stop,
    row, token_keys, feature_keys,
    T: tl.constexpr, C: tl.constexpr, W: tl.constexpr, MASKED: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """[W, C] sum of wide^T narrow over the tokens from ``first`` to ``stop``, tile after tile. What is masked stands on the
    left: matrix units take that operand from registers, the right one from shared memory alone.
    """
    total = tl.full((W, C), 0.0, tl.float32)
    if MASKED:
        keys = tl.load(feature_keys + w, mask=w_valid, other=1)
        threshold = load_integer(row, THRESHOLD)
    for start in range(first, stop, T):
        t = start + tl.arange(0, T)
        t_valid = t < stop
        left = tl.load(
            wide + t[None, :].to(tl.int64) * wide_stride + w[:, None],
            mask=w_valid[:, None] & t_valid[None, :],
            other=0.0,
        )
        right = tl.load(
            narrow + (t - narrow_first)[:, None].to(tl.int64) * narrow_stride + c[None, :],
            mask=t_valid[:, None] & c_valid[None, :],
            other=0.0,
        )
        if MASKED:
            left = keep(left, keys, mix_row_keys(token_keys, row, t, t_valid), threshold)
        total = multiply(left, right, total, WIDEN)
    return total


@triton.jit
def partial_gradients_kernel(
    x, g0, g1, g2, g3, n0, n1, n2, n3, inputs, low, grad_low, partial, table, chunks, token_keys, feature_keys,
    CHUNK: tl.constexpr, T: tl.constexpr, C: tl.constexpr, W: tl.constexpr,
    MASKED: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Per chunk: low^T grad_y of all members and grad_low^T mask(x).

    Grid: (blocks of columns, chunks, blocks of all outputs and of the input).
    """
    row, first, ordinal, end = find_place(table, chunks, tl.program_id(1), CHUNK)
    member, first_column = find_strip(tl.program_id(2), n0, n1, n2, n3, W)
    slab = slab_of(load_integer(row, RANK))
    width = slab * load_integer(row, SLABS)
    stop = tl.minimum(first + CHUNK, end)
    segment_first = load_integer(row, FIRST_ROW)
    lows = load_offset(row, LOW)
    sums = partial + load_offset(row, PARTIAL) + ordinal.to(tl.int64) * load_offset(row, PARTIAL_STEP)
    c = tl.program_id(0) * C + tl.arange(0, C)
    w = first_column + tl.arange(0, W)
    if member == INPUT:
        if tl.program_id(0) * C < width:
            c_valid, w_valid = c < width, w < inputs
            total = _sum_over_tokens(
                grad_low + lows, width, c, c_valid, x, inputs, w, w_valid, segment_first, first, stop,
                row, token_keys, feature_keys, T, C, W, MASKED, WIDEN,
            )  # fmt: skip
            place = sums + c[None, :].to(tl.int64) * inputs + w[:, None]
            tl.store(place, total, mask=w_valid[:, None] & c_valid[None, :])
    else:
        slot = tl.load(row + SLOT + member).to(tl.int32)
        if (slot >= 0) & (tl.program_id(0) * C < slab):
            grad, outputs = pick(member, g0, g1, g2, g3), pick(member, n0, n1, n2, n3)
            c_valid, w_valid = c < slab, w < outputs
            total = _sum_over_tokens(
                low + lows + slot * slab, width, c, c_valid, grad, outputs, w, w_valid, segment_first, first, stop,
                row, token_keys, feature_keys, T, C, W, False, WIDEN,
            )  # fmt: skip
            sums += load_offset(row, PARTIAL_B + member)
            place = sums + c[None, :].to(tl.int64) * outputs + w[:, None]
            tl.store(place, total, mask=w_valid[:, None] & c_valid[None, :])


@triton.jit
def gradients_kernel(
    partial, n0, n1, n2, n3, inputs, table, W: tl.constexpr, VECTOR: tl.constexpr, ALIGNED: tl.constexpr
):  # fmt: skip
    """grad_A and grad_B += strength * the sum over a segment's chunks, one after the other.

    Grid: (RANK_TILE columns of the slabs, segments, blocks of all outputs and of the input).
    """
    row = table + tl.program_id(1) * COLUMNS
    member, first_column = find_strip(tl.program_id(2), n0, n1, n2, n3, W)
    rank = load_rank(row, VECTOR)
    slab = slab_of(rank)
    width = slab * load_integer(row, SLABS)
    of_input = member == INPUT
    slot = tl.where(of_input, 0, tl.load(row + SLOT + member))
    offset = load_offset(row, PARTIAL) + tl.where(of_input, 0, load_offset(row, PARTIAL_B + member))
    outputs = tl.where(of_input, inputs, pick(member, n0, n1, n2, n3))
    columns = tl.where(of_input, width, slab)
    first_c = tl.program_id(0) * RANK_TILE
    if (slot < 0) | (first_c >= columns):
        return
    c = first_c + tl.arange(0, RANK_TILE)
    w = first_column + tl.arange(0, W)
    a_rows, c_valid = rows_of_a(c, rank, slab)
    valid = c_valid[:, None] & (w < outputs)[None, :]
    own = partial + offset + c[:, None].to(tl.int64) * outputs + w[None, :]
    step = load_offset(row, PARTIAL_STEP)
    total = tl.full((RANK_TILE, W), 0.0, tl.float32)
    for chunk in range(load_integer(row, CHUNKS)):
        total += tl.load(own + chunk * step, mask=valid, other=0.0)
    total *= load_real(row, STRENGTH)
    if of_input:
        grad_a = load_address(row, GRAD_A, tl.float32, ALIGNED)
        place = grad_a + a_rows[:, None].to(tl.int64) * inputs + w[None, :]
        tl.store(place, tl.load(place, mask=valid, other=0.0) + total, mask=valid)
    else:
        grad_b = load_address(row, GRAD_B + member, tl.float32, ALIGNED)
        place = grad_b + w[None, :].to(tl.int64) * rank + c[:, None]
        tl.store(place, tl.load(place, mask=valid, other=0.0) + total, mask=valid)
