"""The low-rank products of many tasks on the frozen linear modules of an input group, as one autograd node.

Modules that read the same ``x`` (q, k and v; gate and up) are one node: ``x`` is saved once, and their input gradients
are added up in place by the matrix library. Products are added in place on the rows of the base's outputs, and their
input gradients on the rows of the base's, so no split or concatenate node exists. Gradients of A and B go straight into
the adapters' float32 buffers, multiplied by the segment's weight (1 / supervised tokens of its step): the gradients that
travel between layers and stages are those of plain sums, which stay in the range of half precision. What DoRA multiplies
outputs by comes after all products, and in the backward before them (``magnitudes``).

``reference`` computes the same in plain autograd.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor

from mlora_worker.frozen.weight import FrozenWeight, Multiplier
from mlora_worker.lora.groups import GroupSegment, Products
from mlora_worker.lora.magnitudes import SegmentMagnitudes, scaled_members
from mlora_worker.runtime.precision import product_dtype

Block = tuple[slice, Sequence[GroupSegment]]


class GroupedLinears(torch.autograd.Function):
    """x [..., in] -> per module [..., out]; ``anchor`` requires a gradient, so that the node exists when ``x``
    needs none.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        anchor: Tensor,
        products: Products,
        segments: Sequence[GroupSegment],
        weights: Sequence[FrozenWeight],
        biases: Sequence[Tensor | None],
        magnitudes: Sequence[SegmentMagnitudes] = (),
        tasks: Sequence[slice] = (),
    ) -> tuple[Tensor, ...]:
        del anchor
        flat = x.reshape(-1, x.shape[-1])
        blocks = tuple(row_blocks(len(flat), segments, products.rows_per_block, tasks))
        outputs, saved = _multiplied(flat, products, blocks, weights, biases)
        ctx.counts = [len(lows) for lows in saved]
        saved += [segment.scale(outputs, biases) for segment in magnitudes]
        ctx.save_for_backward(x if segments else None, *(low for lows in saved for low in lows))
        ctx.products, ctx.blocks, ctx.magnitudes = products, blocks, magnitudes
        ctx.weights = weights
        ctx.inputs = x.shape
        return tuple(output.view(*x.shape[:-1], output.shape[-1]) for output in outputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, *lows = ctx.saved_tensors
        flat = None if x is None else x.reshape(-1, x.shape[-1])
        grads = [grad.reshape(-1, grad.shape[-1]) for grad in grad_outputs]
        scaled = scaled_members(ctx.magnitudes)
        grads = [grad.clone() if at in scaled else grad for at, grad in enumerate(grads)]
        for segment in reversed(ctx.magnitudes):
            lows, kept = lows[: -len(segment.own.members)], lows[-len(segment.own.members) :]
            segment.unscale(grads, kept)
        dtype = grads[0].dtype
        wide = product_dtype(dtype, grads[0].device)
        grad_x, multipliers, joined = None, list[Multiplier](), False
        if ctx.needs_input_grad[0]:
            multipliers = [weight.multiplier(wide) for weight in ctx.weights]
            joined = wide == dtype and all(multiplier.joins_rows for multiplier in multipliers)
            empty = None if joined else grads[0].new_empty(len(grads[0]), ctx.inputs[-1])
            grad_x = _back(multipliers, grads) if empty is None else empty
        for (rows, own), count in zip(ctx.blocks, ctx.counts, strict=True):
            saved, lows = tuple(lows[:count]), lows[count:]
            parts = [grad[rows].to(wide) for grad in grads]
            part_x = None if grad_x is None else grad_x[rows].to(wide)
            if part_x is not None and not joined:
                _back(multipliers, parts, part_x)
            if own:
                assert flat is not None
                ctx.products.backward(flat[rows].to(wide), parts, part_x, own, saved)
            if grad_x is not None and part_x is not None and wide != dtype:
                grad_x[rows].copy_(part_x)
        return None if grad_x is None else grad_x.view(ctx.inputs), None, None, None, None, None, None, None


def frozen_product(
    x: Tensor, products: Products, weight: FrozenWeight, bias: Tensor | None, tasks: Sequence[slice]
) -> Tensor:
    """[..., out] of a module that no segment adapts and no gradient passes: with the bits that the rows of each of
    ``tasks`` get where somebody else adapts it."""
    if products.rows_per_block is None:
        plain: Tensor = weight(x, bias)
        return plain
    flat = x.reshape(-1, x.shape[-1])
    blocks = tuple(row_blocks(len(flat), (), products.rows_per_block, tasks))
    [output], _ = _multiplied(flat, products, blocks, (weight,), (bias,))
    return output.view(*x.shape[:-1], output.shape[-1])


def _multiplied(
    flat: Tensor,
    products: Products,
    blocks: Sequence[Block],
    weights: Sequence[FrozenWeight],
    biases: Sequence[Tensor | None],
) -> tuple[list[Tensor], list[Any]]:
    """Of each module its output, the low-rank products added; of each block what these keep for the backward."""
    wide = product_dtype(flat.dtype, flat.device)
    multipliers = [weight.multiplier(wide) for weight in weights]
    wide_biases = [None if bias is None else bias.to(wide) for bias in biases]
    joined = wide == flat.dtype and all(multiplier.joins_rows for multiplier in multipliers)
    outputs = [
        multiplier.times(flat, bias) if joined else flat.new_empty(len(flat), weight.shape[0])
        for multiplier, weight, bias in zip(multipliers, weights, wide_biases, strict=True)
    ]
    saved: list[Any] = []
    for rows, own in blocks:
        some = flat[rows].to(wide)
        targets = [output[rows] for output in outputs]
        parts = targets if wide == flat.dtype else [target.to(wide) for target in targets]
        if not joined:
            for part, multiplier, bias in zip(parts, multipliers, wide_biases, strict=True):
                multiplier.times(some, bias, out=part)
        saved.append(products.forward(some, parts, own) if own else ())
        if wide != flat.dtype:
            for target, part in zip(targets, parts, strict=True):
                target.copy_(part)
    return outputs, saved


def _back(multipliers: Sequence[Multiplier], grads: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """The input's gradient, added up over the modules."""
    total = multipliers[0].back(grads[0], out=out)
    for multiplier, grad in zip(multipliers[1:], grads[1:], strict=True):
        total = multiplier.back(grad, onto=total, out=out)
    return total


def row_blocks(
    tokens: int, segments: Sequence[GroupSegment], rows_per_block: int | None, tasks: Sequence[slice] = ()
) -> Iterator[Block]:
    """Rows to work on at a time, with the segments that lie there; their ``rows`` then count from the block's start.

    None: everything at once, for a device whose launches cost more than its memory. Else blocks of about that many rows,
    each of one segment, or of those on the same rows: what the base's product has just written is still in the cache when
    the segment's are added. Rows are cut at each task (``tasks``: the rows of each), and a task's by their own number
    alone, so that they are computed in the same way beside any neighbours, whoever adapts the modules.
    """
    if rows_per_block is None:
        yield slice(0, tokens), segments
        return
    position = 0
    for (start, stop), same in groupby(segments, key=lambda segment: (segment.rows.start, segment.rows.stop)):
        own = tuple(same)
        yield from _uncovered(position, start, rows_per_block, tasks)
        for rows in _pieces(start, stop, rows_per_block):
            yield rows, tuple(_restricted(segment, rows) for segment in own)
        position = stop
    yield from _uncovered(position, tokens, rows_per_block, tasks)


def _uncovered(start: int, stop: int, wanted: int, tasks: Sequence[slice]) -> Iterator[Block]:
    """Blocks of rows that no segment has."""
    inner = sorted({one.start for one in tasks if start < one.start < stop})
    for first, last in pairwise((start, *inner, stop)):
        for rows in _pieces(first, last, wanted):
            yield rows, ()


def _pieces(start: int, stop: int, wanted: int) -> Iterator[slice]:
    rows = stop - start
    if rows <= 0:
        return
    count = max(1, round(rows / wanted))
    for piece in range(count):
        yield slice(start + rows * piece // count, start + rows * (piece + 1) // count)


def _restricted(segment: GroupSegment, rows: slice) -> GroupSegment:
    """The part of ``segment`` on ``rows`` of the packed tokens."""
    mask = segment.mask
    if mask is not None:
        first = segment.rows.start
        mask = mask.of_rows(slice(rows.start - first, rows.stop - first))
    return replace(segment, rows=slice(0, rows.stop - rows.start), mask=mask)
