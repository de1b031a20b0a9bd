"""The plain tensor in the products of oneDNN.

oneDNN writes kernels for the processor that it finds, and torch's own matrix library does not always: on AMD's with AVX-512
it stays on a narrower path, at less than half the speed. Weights are not kept in the library's own order: it puts the part
that it needs in order as it goes, which costs at most 5 % of a product and 12 % of a head's (measured); copies in order,
one for each direction, would cost twice the weights' memory.

A row's result is the same bits whatever rows are beside it and wherever it lies among them
(``tests/equivalence/test_onednn_products.py``), so rows of many tasks are multiplied together. In bfloat16 it is not on
processors that multiply tiles (AMX), so there each task's rows are multiplied by themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mlora_worker.frozen.plain import PlainWeight
from mlora_worker.frozen.weight import FrozenWeight, Multiplier

_LIBRARY = torch.ops.mkldnn


def available(dtype: torch.dtype) -> bool:
    """Whether this build of torch has the library, and the processor multiplies ``dtype`` in it."""
    if not hasattr(_LIBRARY, "_linear_pointwise"):
        return False
    if dtype == torch.bfloat16:
        return bool(_LIBRARY._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def joins_rows(dtype: torch.dtype) -> bool:
    """Whether a row's result knows nothing of the rows beside it, on this processor."""
    return dtype == torch.float32 or not torch.cpu._is_amx_tile_supported()


class OneDnnWeight(PlainWeight):
    """float32 or bfloat16, on the CPU."""

    library = "oneDNN"

    def multiplier(self, dtype: torch.dtype) -> Multiplier:
        return by_onednn(self.matrix.detach()) if dtype == self.dtype else super().multiplier(dtype)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return FrozenWeight.forward(self, x, bias)


def by_onednn(matrix: Tensor) -> Multiplier:
    """[out, in], for a pass."""
    return _OneDnnMultiplier(matrix, matrix.T)


@dataclass(frozen=True, slots=True)
class _OneDnnMultiplier:
    forward: Tensor  # [out, in]
    backward: Tensor  # [in, out]

    @property
    def joins_rows(self) -> bool:
        return joins_rows(self.forward.dtype)

    def times(self, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        y: Tensor = _LIBRARY._linear_pointwise(_two(x), self.forward, bias, "none", [], "")[: len(x)]
        return y if out is None else out.copy_(y)

    def back(self, grad: Tensor, onto: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        total: Tensor
        if onto is None:
            total = _LIBRARY._linear_pointwise(_two(grad), self.backward, None, "none", [], "")
        else:
            total = _LIBRARY._linear_pointwise.binary(_two(grad), _two(onto), self.backward, None, "add")
        total = total[: len(grad)]
        return total if out is None else out.copy_(total)


def _two(rows: Tensor) -> Tensor:
    """A single row is doubled: of one alone, the library adds up long rows in another order."""
    return rows.expand(2, -1).contiguous() if len(rows) == 1 else rows
