"""Products of torch's own matrix library with the rows of many tasks together.

In how many parts the library adds up a row, and so which bits it gets, depends on the shapes, the number of threads, and
often on how many rows there are. A stage whose shapes show no such dependence here multiplies all rows of a microbatch
together: a product prepares the matrix once and not once for each task. With other shapes each task's rows stay alone.

Whether there is a dependence is tried when the stage starts, with its own shapes, type and threads, on products of the same
few rows, taken again and again: a row must give the same bits wherever it lies, and however many rows there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mlora_worker.frozen.linear import Freeze
from mlora_worker.frozen.plain import DenseMultiplier, PlainWeight
from mlora_worker.frozen.weight import FrozenWeight, Multiplier

FEWEST = 16  # rows of a product: fewer take a way of their own through the library, and are filled up
MOST = 1024  # rows of a product: more are cut
_TRIED = (FEWEST, 33, 100, 300, MOST)
_LARGEST = 2**22  # elements of a matrix that is tried: larger ones would take seconds

Shape = tuple[int, int]  # [out, in]


def joining(shapes: Iterable[Shape], dtype: torch.dtype) -> frozenset[Shape]:
    """Of ``shapes``, those with which a row has the same bits whatever rows are beside it. In narrower types than float32
    there are none: their rounding hides what differs, but for one number in many thousands."""
    if dtype != torch.float32:
        return frozenset()
    return frozenset(shape for shape in shapes if _is_independent(shape, dtype))


def freeze_joining(joined: frozenset[Shape]) -> Freeze:
    """What makes weights that multiply so, where they are of one of the shapes ``joined``."""

    def freeze(matrix: Tensor) -> FrozenWeight:
        return (JoiningWeight if tuple(matrix.shape) in joined else PlainWeight)(matrix)

    return freeze if joined else PlainWeight


class JoiningWeight(PlainWeight):
    """Of a shape for which ``joining`` has shown it."""

    def multiplier(self, dtype: torch.dtype) -> Multiplier:
        plain = DenseMultiplier(self.dense(dtype))
        return JoinedMultiplier(plain) if dtype == self.dtype else plain

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return FrozenWeight.forward(self, x, bias)


@dataclass(frozen=True, slots=True)
class JoinedMultiplier:
    plain: DenseMultiplier

    @property
    def joins_rows(self) -> bool:
        return True

    def times(self, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        if len(x) < FEWEST:
            few = self.plain.times(_filled(x), bias)[: len(x)]
            return few if out is None else out.copy_(few)
        y = x.new_empty(len(x), self.plain.matrix.shape[0]) if out is None else out
        for rows in _pieces(len(x)):
            self.plain.times(x[rows], bias, out=y[rows])
        return y

    def back(self, grad: Tensor, onto: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        target = onto if out is None else out
        if len(grad) < FEWEST:
            few = self.plain.back(_filled(grad), None if onto is None else _filled(onto))[: len(grad)]
            return few if target is None else target.copy_(few)
        total = grad.new_empty(len(grad), self.plain.matrix.shape[1]) if target is None else target
        for rows in _pieces(len(grad)):
            self.plain.back(grad[rows], None if onto is None else onto[rows], out=total[rows])
        return total


def _pieces(rows: int) -> Iterator[slice]:
    count = -(-rows // MOST)
    for piece in range(count):
        yield slice(rows * piece // count, rows * (piece + 1) // count)


def _filled(rows: Tensor) -> Tensor:
    """With rows of zeros, up to the fewest."""
    return torch.cat([rows, rows.new_zeros(FEWEST - len(rows), rows.shape[1])])


def _is_independent(shape: Shape, dtype: torch.dtype) -> bool:
    outputs, inputs = shape
    if outputs * inputs > _LARGEST:
        return False
    generator = torch.Generator().manual_seed(0)

    def drawn(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(dtype)

    multiplier = DenseMultiplier(drawn(*shape))
    x, grad, onto = drawn(FEWEST, inputs), drawn(FEWEST, outputs), drawn(FEWEST, inputs)
    bias = drawn(outputs)
    seen: list[Tensor] = []  # the rows that each kind of product gave at first
    for rows in _TRIED:
        source = torch.arange(rows) % FEWEST
        grads = grad[source]
        found = (
            multiplier.times(x[source]),
            multiplier.times(x[source], bias),
            multiplier.back(grads),
            multiplier.back(grads, onto=onto[source]),
        )
        seen = seen or [product.clone() for product in found]
        if not all(torch.equal(product, first[source]) for product, first in zip(found, seen, strict=True)):
            return False
    return True
