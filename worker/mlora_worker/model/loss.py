"""Cross entropy over supervised positions, in chunks.

The head is applied to supervised positions only, a chunk at a time, and each chunk's gradient with regard to
the hidden states is computed at once, in forward: logits of the whole vocabulary exist for one chunk, never
for the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mlora_worker.frozen.onednn import joins_rows
from mlora_worker.frozen.weight import FrozenWeight, Multiplier
from mlora_worker.model.transfer import to_device
from mlora_worker.runtime.kernel_compiler import missing_for_triton
from mlora_worker.runtime.precision import product_dtype
from mlora_worker.stream.footprint import FEWEST_LOSS_ROWS, chunk_rows

IGNORED = -100


def segment_losses(
    hidden: Tensor,
    labels: Tensor,
    segment_tokens: Sequence[int],
    norm: Callable[[Tensor], Tensor],
    head_weight: FrozenWeight,
    logit_cap: float | None = None,
    weights: Tensor | None = None,
    task_tokens: Sequence[int] | None = None,
) -> Tensor:
    """[segments] float64: each segment's sum of cross entropies, differentiable with regard to ``hidden``. What is called
    a segment here may be any part of one, such as a row: each has a sum of its own.

    hidden [tokens, size]: output of the last decoder layer. labels [tokens] int64, in the host's memory: the
    target at each position, ``IGNORED`` where nothing is predicted. segment_tokens: tokens of each segment, in
    order. head_weight [vocabulary, size]. logit_cap: logits become ``cap * tanh(logits / cap)``. weights [tokens] float64,
    in the host's memory: what each position's cross entropy is multiplied by; None: nothing. task_tokens: tokens of each
    task, where a task has several segments. A segment without supervised positions has loss 0 and gradient 0.

    Which positions are supervised is found out on the host, where the labels are: shapes that depended on what
    a GPU holds would stop the host until the GPU has come so far.
    """
    positions = (labels != IGNORED).nonzero().squeeze(1)
    counts = supervised_of_parts(labels, segment_tokens)
    owners = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    device = hidden.device
    normed = norm(hidden.index_select(0, to_device(positions, device)))
    losses: Tensor = ChunkedCrossEntropy.apply(
        normed,
        head_weight,
        to_device(labels[positions], device),
        to_device(owners, device),
        counts,
        counts if task_tokens is None else supervised_of_parts(labels, task_tokens),
        chunk_rows(head_weight.shape[0], device.type),
        logit_cap,
        None if weights is None else to_device(weights[positions], device),
    )
    return losses


def supervised_together(labels: Tensor, task_tokens: Sequence[int], head_weight: FrozenWeight) -> list[int]:
    """Supervised positions whose rows of logits are made together: those of each task, or all of them where the head
    multiplies many tasks' rows as one. What ``ChunkedCrossEntropy`` does, found out without a product."""
    counts = supervised_of_parts(labels, task_tokens)
    by_library = head_weight.library != FrozenWeight.library and joins_rows(head_weight.dtype)
    return [sum(counts)] if by_library or head_weight.device.type == "cuda" else counts


def supervised_of_parts(labels: Tensor, part_tokens: Sequence[int]) -> list[int]:
    """Supervised positions of each part; ``labels`` as above."""
    ends = torch.tensor(part_tokens, dtype=torch.int64).cumsum(0)
    before = torch.cat([torch.zeros(1, dtype=torch.int64), (labels != IGNORED).cumsum(0)])[ends]
    counts: list[int] = torch.diff(before, prepend=torch.zeros(1, dtype=torch.int64)).tolist()
    return counts


class ChunkedCrossEntropy(torch.autograd.Function):
    """[positions, size] -> [segments]: sums of cross entropies per owner; ``counts``: positions of each owner;
    ``task_counts``: of each task, whose positions are multiplied by themselves unless the head joins rows.

    Saves the gradient [positions, size] of each position's own loss; backward multiplies it by the owner's
    gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        normed: Tensor,
        head_weight: FrozenWeight,
        targets: Tensor,
        owners: Tensor,
        counts: Sequence[int],
        task_counts: Sequence[int],
        chunk: int,
        logit_cap: float | None,
        weights: Tensor | None = None,
    ) -> Tensor:
        wide = product_dtype(normed.dtype, normed.device)
        head = head_weight.multiplier(wide)
        gradient = torch.empty_like(normed)
        losses = torch.empty(
            len(normed), dtype=torch.promote_types(normed.dtype, torch.float32), device=normed.device
        )
        joined = normed.is_cuda or (head.joins_rows and wide == normed.dtype)
        for rows in _chunks((len(normed),) if joined else task_counts, chunk):
            losses[rows], gradient[rows] = _chunk(normed[rows].to(wide), head, targets[rows], logit_cap)
        ctx.save_for_backward(gradient, owners, weights)
        if weights is not None:
            losses = losses * weights
        sums = torch.zeros(len(counts), dtype=torch.float64, device=normed.device)
        # One sum per segment, over its own positions: the order of addition knows nothing of neighbours.
        for index, own in enumerate(torch.split(losses, list(counts))):
            sums[index] = own.sum(dtype=torch.float64)
        return sums

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        gradient, owners, weights = ctx.saved_tensors
        factors = grad_outputs[0][owners] if weights is None else grad_outputs[0][owners] * weights
        # Rounded to the gradient's type once, at the end.
        exact = factors.to(torch.promote_types(gradient.dtype, torch.float32))
        weighted = torch.mul(gradient, exact[:, None], out=torch.empty_like(gradient))
        return weighted, None, None, None, None, None, None, None, None


def _chunks(counts: Sequence[int], most: int) -> Iterator[slice]:
    """At most ``most`` positions at a time, and of one of ``counts`` each."""
    start = 0
    for count in counts:
        for first in range(start, start + count, most):
            yield slice(first, min(first + most, start + count))
        start += count


def _chunk(
    normed: Tensor, head: Multiplier, targets: Tensor, logit_cap: float | None
) -> tuple[Tensor, Tensor]:
    """Losses [rows] and their gradients [rows, size] of one chunk; softmax in float32 or better."""
    rows = len(normed)
    logits = head.times(_at_least(FEWEST_LOSS_ROWS, normed))[:rows]
    if logits.is_cuda and missing_for_triton() is None:
        from mlora_worker.model.triton_loss import cross_entropy_in_place

        slope = _cap(logits, logit_cap)
        losses = cross_entropy_in_place(logits, targets)
        _times(logits, slope)
        return losses, head.back(_at_least(FEWEST_LOSS_ROWS, logits))[:rows]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    slope = _cap(logits, logit_cap)
    every = torch.arange(rows, device=targets.device)
    # In place: max, exponent and sum pass over the chunk, nothing of its size is allocated again.
    logits -= logits.amax(dim=1, keepdim=True)
    target_logits = logits[every, targets]
    logits.exp_()
    sums = logits.sum(dim=1)
    losses = sums.log() - target_logits
    # d loss / d logits = softmax - onehot = (exp - onehot * sum) / sum; the division is left to the smaller
    # product.
    logits[every, targets] -= sums
    _times(logits, slope)
    weights = _at_least(FEWEST_LOSS_ROWS, logits.to(normed.dtype))
    gradient = head.back(weights)[:rows]
    return losses, gradient / sums[:, None].to(gradient.dtype)


def _cap(logits: Tensor, cap: float | None) -> Tensor | None:
    """Cap ``logits`` in place. The slope of that, 1 - tanh^2, of the same shape."""
    if cap is None:
        return None
    logits.div_(cap).tanh_()
    slope = (-logits).mul_(logits).add_(1)
    logits.mul_(cap)
    return slope


def _times(logits: Tensor, slope: Tensor | None) -> None:
    if slope is not None:
        logits.mul_(slope)


def _at_least(rows: int, tensor: Tensor) -> Tensor:
    """``tensor`` [n, columns] with rows of zeros below, where it has fewer than ``rows``."""
    if len(tensor) >= rows:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(rows - len(tensor), tensor.shape[1])])
