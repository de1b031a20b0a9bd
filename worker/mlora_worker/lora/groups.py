"""What the low-rank products of one microbatch need, for linear modules that share their input.

q, k and v of a layer read the same hidden states, and so do gate and up. Such modules form an *input group*: ``x`` is
saved once for all of them, dropped out once, and multiplied once by all their A matrices, which lie one below the other
in the adapter's buffer. A *group segment* is one task's part: its rows of the packed input, its A and B of the group's
modules that it targets, and where their gradients go.

``Products`` is the one interface behind which devices differ: ``cpu.py`` and ``triton_kernels.py`` implement it, and each
is tested against ``reference.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from mlora_worker.lora.dropout import DropoutMask


@dataclass(frozen=True, slots=True)
class GroupSegment:
    """One task's part of a microbatch on one input group.

    On its rows, for each targeted module m (the j-th of ``members``)::

        y_m += factor * (mask(x) A_j^T) B_j^T           A_j = a[j * rank : (j + 1) * rank]

    and backward adds ``factor * weight * ...`` to ``grad_a`` and ``grad_b``, and ``factor * mask(grad_low A)`` to the
    input's gradient. ``mask`` keeps or zeroes elements; its rescaling is part of ``factor``.
    """

    # Of the packed tokens. Segments lie one after the other and cover all rows that have a product. Where a task gives
    # modules of a group other ranks or scales, it has one segment for each, on the same rows, with other members.
    rows: slice
    rank: int
    members: tuple[int, ...]  # positions within the group of the modules that the task targets, ascending
    a: Tensor  # [members * rank, in], contiguous, in the base's type
    b: tuple[Tensor, ...]  # per member [out, rank], contiguous, in the base's type
    grad_a: Tensor  # [members * rank, in] float32, added to
    grad_b: tuple[Tensor, ...]  # per member [out, rank] float32, added to
    scale: float  # alpha / rank, or what takes its place
    weight: float  # of this segment's loss: 1 / supervised tokens of the step
    mask: DropoutMask | None  # None: no dropout. One mask for all members: they share the input

    @property
    def factor(self) -> float:
        """What the products are multiplied by, dropout's rescaling included."""
        return self.scale if self.mask is None else self.scale * self.mask.rescale


class Products(Protocol):
    """Adds all segments' products on one input group, in place. Launches do not grow with the number of segments."""

    @property
    def rows_per_block(self) -> int | None:
        """The function calls ``forward`` and ``backward`` for about so many rows at a time; None: for all at once."""
        ...

    def prepare(self, groups: Sequence[Sequence[GroupSegment]]) -> Sequence[Sequence[GroupSegment]]:
        """Once per microbatch, before its forward, all groups of all layers together: tables for a device travel in one
        copy. The answer, in the same order, takes the groups' place in ``forward`` and ``backward``; where nothing is to
        be prepared it is ``groups`` itself.
        """
        ...

    def forward(
        self, x: Tensor, outputs: Sequence[Tensor], segments: Sequence[GroupSegment]
    ) -> tuple[Tensor, ...]:
        """Add to ``outputs`` (per member of the group [tokens, out]); x [tokens, in].

        Returns what backward needs beside ``x`` (the low-rank activations), never anything of ``x``'s size.
        """
        ...

    def backward(
        self,
        x: Tensor,
        grad_outputs: Sequence[Tensor],
        grad_x: Tensor | None,
        segments: Sequence[GroupSegment],
        saved: tuple[Tensor, ...],
    ) -> None:
        """Add to every segment's ``grad_a`` and ``grad_b``, and to ``grad_x`` [tokens, in] where it is wanted."""
        ...
