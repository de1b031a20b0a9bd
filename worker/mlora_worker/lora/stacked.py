"""A and B of every expert of a layer, for one parameter that holds the matrices of all.

In files PEFT has them as one module whose rank is that of all experts together: A [experts * rank, in], where an expert's
rows lie one below the other, and B [out, rank * experts], where an expert's columns lie apart. A product with the latter
would go through the memory in steps, so while a task trains an expert's B lies in one piece. Parameters, gradients and
moments are all laid out so, since an optimizer goes element by element; what is written or read is put in order in place.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class StackedPair:
    """Views of one flat tensor."""

    a: Tensor  # [experts, rank, in]
    b: Tensor  # [experts, out, rank]
    swapped: bool = False  # A is behind B

    def of(self, expert: int) -> tuple[Tensor, Tensor]:
        """Of one expert, what its input is multiplied by first [rank, in], and then [out, rank]."""
        a, b = self.a[expert], self.b[expert]
        return (b.T, a.T) if self.swapped else (a, b)

    def as_filed(self) -> tuple[Tensor, Tensor]:
        """A and B of a tensor that is in the order of files, in their shapes there."""
        return self.a.view(-1, self.a.shape[2]), self.b.view(self.b.shape[1], -1)

    def to_files(self) -> None:
        """[experts, out, rank] becomes [out, rank, experts]."""
        self.b.view(-1).copy_(self.b.permute(1, 2, 0).reshape(-1))

    def from_files(self) -> None:
        experts, outputs, rank = self.b.shape
        self.b.copy_(self.b.view(outputs, rank, experts).permute(2, 0, 1).contiguous())


@dataclass(frozen=True, slots=True)
class Stacked:
    """A parameter that is adapted."""

    path: str  # in the whole model, such as model.layers.3.mlp.experts.down_proj
    file_path: str  # what its tensors' names begin with in files
    experts: int
    inputs: int
    outputs: int
    rank: int  # of one expert
    swapped: bool = False  # ``inputs`` are what an expert gives, and ``outputs`` what it takes

    @property
    def inward(self) -> int:
        """Numbers of all A."""
        return self.experts * self.rank * self.inputs

    @property
    def outward(self) -> int:
        return self.experts * self.outputs * self.rank

    def pair(self, inward: Tensor, outward: Tensor) -> StackedPair:
        return StackedPair(
            inward.view(self.experts, self.rank, self.inputs),
            outward.view(self.experts, self.outputs, self.rank),
            self.swapped,
        )
