"""Cross entropy of a chunk of logits in one kernel: two passes over memory where plain torch needs ten."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # of the vocabulary; fixed, so that the order of additions is
WARPS = 8


def cross_entropy_in_place(logits: Tensor, targets: Tensor, block: int = BLOCK) -> Tensor:
    """Losses [rows] float32; ``logits`` [rows, vocabulary], contiguous, become their gradients.

    Each row is one program's: its result does not depend on the other rows.
    """
    if not logits.is_contiguous():
        raise ValueError("logits must be contiguous")
    losses = logits.new_empty(len(logits), dtype=torch.float32)
    if len(logits):
        with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
            cross_entropy_kernel[(len(logits),)](
                logits, targets, losses, logits.shape[1], BLOCK=block, num_warps=WARPS
            )
    return losses


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _sum(a, b):
    return a + b


@triton.jit
def cross_entropy_kernel(logits, targets, losses, vocabulary, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    own = logits + row.to(tl.int64) * vocabulary
    target = tl.load(targets + row)
    target_logit = tl.load(own + target).to(tl.float32)
    biggest = tl.full((BLOCK,), -float("inf"), tl.float32)
    total = tl.full((BLOCK,), 0.0, tl.float32)
    # Each lane has a maximum and a sum of its own; they meet after the last block. A lane that has seen nothing but
    # -inf takes no difference of infinities.
    for start in range(0, vocabulary, BLOCK):
        c = start + tl.arange(0, BLOCK)
        value = tl.load(own + c, mask=c < vocabulary, other=-float("inf")).to(tl.float32)
        greater = tl.where(value > biggest, value, biggest)
        shift = tl.where(greater == -float("inf"), 0.0, greater)
        total = total * tl.exp(biggest - shift) + tl.exp(value - shift)
        biggest = greater
    most = tl.reduce(biggest, 0, _larger)
    sum_ = tl.reduce(total * tl.exp(biggest - most), 0, _sum)
    tl.store(losses + row, tl.log(sum_) + most - target_logit)
    for start in range(0, vocabulary, BLOCK):
        c = start + tl.arange(0, BLOCK)
        value = tl.load(own + c, mask=c < vocabulary, other=-float("inf")).to(tl.float32)
        gradient = tl.exp(value - most) / sum_ - tl.where(c == target, 1.0, 0.0)
        tl.store(own + c, gradient.to(logits.dtype.element_ty), mask=c < vocabulary)
