"""A weight in the order in which oneDNN multiplies, twice: for rows, and turned round for gradients.

oneDNN writes kernels for the processor that it finds, and torch's own matrix library does not always: on AMD's with AVX-512
it stays on a narrower path, at less than half the speed. The plain tensor is not kept: the packed one is turned back where
a dense matrix is asked for.

A row's result is the same bits whatever rows are beside it and wherever it lies among them
(``tests/unit/worker/frozen/test_packed.py``), so rows of many tasks are multiplied together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mlora_worker.frozen.plain import DenseMultiplier, PlainWeight
from mlora_worker.frozen.weight import FrozenWeight, Multiplier

_LIBRARY = torch.ops.mkldnn
# That the order is chosen for. It is one for all numbers of rows but the smallest.
_USUAL_ROWS = 512


def available(dtype: torch.dtype) -> bool:
    """Whether this build of torch has the library, and the processor multiplies ``dtype`` in it."""
    if not hasattr(_LIBRARY, "_reorder_linear_weight"):
        return False
    if dtype == torch.bfloat16:
        return bool(_LIBRARY._is_mkldnn_bf16_supported())
    return dtype == torch.float32


class PackedWeight(FrozenWeight):
    """Takes twice the bytes of ``matrix``, float32 or bfloat16 on the CPU."""

    library = "oneDNN"

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        outputs, inputs = matrix.shape
        self.shape = (outputs, inputs)
        matrix = matrix.detach()
        self.dtype = matrix.dtype
        self._packed = _PackedMultiplier(_pack(matrix), _pack(matrix.T.contiguous()))

    def dense(self, dtype: torch.dtype) -> Tensor:
        return self._packed.forward.to_dense().to(dtype)

    def multiplier(self, dtype: torch.dtype) -> Multiplier:
        return self._packed if dtype == self.dtype else DenseMultiplier(self.dense(dtype))

    @property
    def opaque_bytes(self) -> int:
        return sum(int(_LIBRARY._nbytes(one)) for one in (self._packed.forward, self._packed.backward))


def _pack(matrix: Tensor) -> Tensor:
    packed: Tensor = _LIBRARY._reorder_linear_weight(matrix, _USUAL_ROWS)
    return packed


@dataclass(frozen=True, slots=True)
class _PackedMultiplier:
    forward: Tensor  # [out, in]
    backward: Tensor  # [in, out]

    @property
    def joins_rows(self) -> bool:
        return True

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


class UnpackedWeight(PlainWeight):
    """The plain tensor in oneDNN's products, which put it in order for each: somewhat slower, and no byte more."""

    library = PackedWeight.library

    def multiplier(self, dtype: torch.dtype) -> Multiplier:
        return unpacked(self.matrix.detach()) if dtype == self.dtype else super().multiplier(dtype)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return FrozenWeight.forward(self, x, bias)


def unpacked(matrix: Tensor) -> Multiplier:
    """[out, in], for a pass."""
    return _PackedMultiplier(matrix, matrix.T)
