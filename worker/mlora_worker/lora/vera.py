"""VeRA: two random matrices for all modules, which stay as they are, and for each module two vectors that learn.

A module adds ``d_out * (B (d_in * (A x)))``: the low-rank product of ``A`` and ``B`` whose rows are multiplied by the
vectors. So it is trained as such a product is, by the same kernels, and the gradients of the rows become those of the
vectors once a step. The matrices are as large as the largest module needs, and each takes the first rows and columns of
them. They follow from the task's seed alone, in the way in which PEFT makes them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from mlora_worker.lora.adapter import Adapter, FlatAdapter, Layout, Stack, padded
from mlora_worker.lora.lasting import lasting_zeros

PROJECTION_KEYS = ("base_model.vera_A", "base_model.vera_B")  # in adapter_model.safetensors


def projections(seed: int, rank: int, inputs: int, outputs: int) -> tuple[Tensor, Tensor]:
    """[rank, inputs] and [outputs, rank] float32 on the CPU: Kaiming uniform, one after the other from one generator."""
    generator = torch.Generator().manual_seed(seed)

    def made(rows: int, columns: int) -> Tensor:
        bound = math.sqrt(3.0) * (math.sqrt(2.0) / math.sqrt(columns))
        return torch.empty(rows, columns).uniform_(-bound, bound, generator=generator)

    return made(rank, inputs), made(outputs, rank)


def vera_keys(path: str) -> tuple[str, str]:
    """Names of the vectors of A's and of B's rows in ``adapter_model.safetensors``."""
    return f"base_model.model.{path}.vera_lambda_d", f"base_model.model.{path}.vera_lambda_b"


class VeraAdapter(FlatAdapter):
    """As ``Adapter``: ``parameters`` and ``gradient`` are of the vectors, ``compute`` and ``gradients`` of the matrices
    that they make, group by group. ``a`` and ``b``: the random matrices of the whole model."""

    def __init__(
        self,
        groups: Sequence[Mapping[str, tuple[int, int]]],
        a: Tensor,
        b: Tensor,
        *,
        start: float,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._groups = [dict(group) for group in groups]
        self._rank = len(a)
        self._a, self._b = (a.to(device), b.to(device)) if groups else (a[:0], b[:0])
        elements = sum(
            padded(self._rank) + padded(outputs) for group in self._groups for _, outputs in group.values()
        )
        self.inward = elements  # B does not learn at a rate of its own
        self.parameters = nn.Parameter(lasting_zeros(elements, device))
        self.gradient = lasting_zeros(elements, device)
        layout = Layout(groups, (self._rank,) * len(groups))
        self._matrices = lasting_zeros(layout.elements, device).to(dtype)
        self._gradients = lasting_zeros(layout.elements, device)
        self.compute, self.gradients = layout.of(self._matrices), layout.of(self._gradients)
        # Per module its vectors and its matrices; then the gradients of both.
        self._values = self._each(self.parameters.detach(), self.compute)
        self._slopes = self._each(self.gradient, self.gradients)
        for (inward, _), _ in self._values:
            inward.fill_(start)
        self.refresh()

    def refresh(self) -> None:
        """The vectors have changed: make the matrices again."""
        for (inward, outward), (a, b) in self._values:
            torch.mul(self._a[:, : a.shape[1]], inward[:, None], out=a)
            torch.mul(self._b[: len(b)], outward[:, None], out=b)

    def settle(self) -> None:
        """Bring what the backward has added to the matrices' gradients to the vectors'."""
        for (inward, outward), (a, b) in self._slopes:
            inward.add_(torch.linalg.vecdot(a, self._a[:, : a.shape[1]]))
            outward.add_(torch.linalg.vecdot(b, self._b[: len(b)]))
        self._gradients.zero_()

    def forget_gradients(self) -> None:
        self.gradient.zero_()
        self._gradients.zero_()

    def squared_norm(self) -> Tensor:
        """[] float64: of this stage's gradients, once a step's backward is done."""
        self.settle()
        norm: Tensor = torch.linalg.vector_norm(self.gradient, dtype=torch.float64)
        return norm.square()

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        return {
            name: view
            for path, vectors in self._vectors(flat).items()
            for name, view in zip(vera_keys(path), vectors, strict=True)
        }

    @property
    def bytes(self) -> int:
        """Of vectors, matrices and gradients."""
        matrices = (self._a, self._b, self._matrices, self._gradients)
        return sum(tensor.nbytes for tensor in (self.parameters, self.gradient, *matrices))

    def _vectors(self, flat: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        found, start = {}, 0
        for group in self._groups:
            for path, (_, outputs) in group.items():
                inward = flat[start : start + self._rank]
                start += padded(self._rank)
                found[path] = inward, flat[start : start + outputs]
                start += padded(outputs)
        return found

    def _each(
        self, flat: Tensor, stacks: Sequence[Stack]
    ) -> list[tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]]:
        """Each module's vectors in ``flat``, and its matrices in ``stacks``; views."""
        vectors, rank = self._vectors(flat), self._rank
        return [
            (vectors[path], (stack.a[j * rank : (j + 1) * rank], stack.b[j]))
            for group, stack in zip(self._groups, stacks, strict=True)
            for j, path in enumerate(group)
        ]


AnyAdapter = Adapter | VeraAdapter
