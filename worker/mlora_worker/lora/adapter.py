"""One task's adapter on one stage: parameters, gradient buffers, names and start.

All of a task's A and B lie in one flat float32 tensor, their gradients in another: clipping, zeroing, the
norm and the optimizer are each one operation, however many modules there are. First lie all A, then all B (and the
magnitudes of DoRA), which may learn at another rate (LoRA+). The A matrices of modules that share their input lie one below
the other, so that one product serves them all.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mlora_worker.lora.lasting import lasting_zeros
from mlora_worker.lora.stacked import Stacked, StackedPair
from mlora_worker.protocol import InitialWeights
from mlora_worker.stream.footprint import NORM_AT_ONCE

_ALIGNMENT = 16  # elements: each tensor starts on a cache line


@dataclass(frozen=True, slots=True)
class Pair:
    """A and B of one module, or their gradients; views."""

    a: Tensor  # [rank, in]
    b: Tensor  # [out, rank]
    magnitude: Tensor | None  # [out]; with DoRA

    def named(self, path: str) -> dict[str, Tensor]:
        """By PEFT's names."""
        names = dict(zip(peft_keys(path), (self.a, self.b), strict=True))
        return names if self.magnitude is None else names | {magnitude_key(path): self.magnitude}


@dataclass(frozen=True, slots=True)
class Stack:
    """What belongs to one input group; views."""

    a: Tensor  # [modules * rank, in]
    b: tuple[Tensor, ...]  # per module [out, rank]
    magnitudes: tuple[Tensor, ...]  # per module [out]; with DoRA, else there are none


class Layout:
    """Where the matrices of ``groups``, and then of ``stacked``, are in a flat tensor of ``elements``: first all A,
    ``inward`` elements of them."""

    def __init__(
        self,
        groups: Sequence[Mapping[str, tuple[int, int]]],
        ranks: Sequence[int],
        magnitudes: bool = False,
        stacked: Sequence[Stacked] = (),
    ) -> None:
        self._groups, self._ranks = [dict(group) for group in groups], tuple(ranks)
        self._with_magnitudes, self._stacked = magnitudes, tuple(stacked)
        self._stacked_inward = sum(
            padded(rank * inputs * len(group))
            for group, rank in zip(self._groups, self._ranks, strict=True)
            for inputs in {inputs for inputs, _ in group.values()}
        )
        self.inward = self._stacked_inward + sum(padded(one.inward) for one in self._stacked)
        self._stacked_outward = self.inward + sum(
            padded(outputs * rank) + (padded(outputs) if magnitudes else 0)
            for group, rank in zip(self._groups, self._ranks, strict=True)
            for _, outputs in group.values()
        )
        self.elements = self._stacked_outward + sum(padded(one.outward) for one in self._stacked)

    def of(self, flat: Tensor) -> list[Stack]:
        """Views of ``flat``, in the order of the groups."""
        stacks, inward, outward = [], 0, self.inward
        for group, rank in zip(self._groups, self._ranks, strict=True):
            inputs = next(iter(group.values()))[0]
            a = flat[inward : inward + len(group) * rank * inputs].view(-1, inputs)
            inward += padded(a.numel())
            bs = []
            for _, outputs in group.values():
                bs.append(flat[outward : outward + outputs * rank].view(outputs, rank))
                outward += padded(bs[-1].numel())
            magnitudes = []
            for _, outputs in group.values() if self._with_magnitudes else ():
                magnitudes.append(flat[outward : outward + outputs])
                outward += padded(outputs)
            stacks.append(Stack(a, tuple(bs), tuple(magnitudes)))
        return stacks

    def stacked(self, flat: Tensor) -> list[StackedPair]:
        """Views of ``flat``, in the order of the parameters."""
        pairs, inward, outward = [], self._stacked_inward, self._stacked_outward
        for one in self._stacked:
            pairs.append(one.pair(flat[inward : inward + one.inward], flat[outward : outward + one.outward]))
            inward, outward = inward + padded(one.inward), outward + padded(one.outward)
        return pairs

    def by_path(self, stacks: Sequence[Stack]) -> dict[str, Pair]:
        return {
            path: Pair(
                stack.a[j * rank : (j + 1) * rank], b, stack.magnitudes[j] if stack.magnitudes else None
            )
            for group, rank, stack in zip(self._groups, self._ranks, stacks, strict=True)
            for j, (path, b) in enumerate(zip(group, stack.b, strict=True))
        }


class FlatAdapter(ABC):
    """What adapters of all kinds have in common: names for the numbers that learn, which lie in one flat tensor."""

    parameters: nn.Parameter  # [elements] float32

    @abstractmethod
    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of ``flat``, which is in the order of files, by PEFT's names with global layer indices."""

    def to_files(self, flat: Tensor) -> Tensor:
        """Put ``flat``, which is laid out as the parameters are, into the order that ``named`` reads; in place."""
        return flat

    def from_files(self, flat: Tensor) -> Tensor:
        """The opposite of ``to_files``."""
        return flat

    def fill(self, flat: Tensor, tensors: Mapping[str, Tensor], prefix: str = "") -> None:
        """Replace what is in ``flat``, which is laid out as the parameters are, by ``tensors``, by PEFT's names behind
        ``prefix``; those of other stages are passed over."""
        for name, view in self.named(flat).items():
            view.copy_(tensors[prefix + name])
        self.from_files(flat)

    @abstractmethod
    def refresh(self) -> None:
        """The parameters have changed: bring up to date all that follows from them."""

    def export(self) -> dict[str, Tensor]:
        """float32 copies on the CPU, by PEFT's names with global layer indices."""
        return self.named(self.to_files(self.parameters.detach().to("cpu", copy=True)))

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the parameters. ``tensors``: the whole adapter, or this stage's part, by PEFT's names."""
        self.fill(self.parameters.detach(), tensors)
        self.refresh()


class Adapter(FlatAdapter):
    """``groups``: the (in, out) of each adapted module of this stage, by its path in the whole model; those together that
    read the same input and have the same rank.

    ``rank``: of all groups, or of each.

    ``magnitudes``: with one number for each output of each module (DoRA). They are zeros until somebody sets them.

    ``stacked``: the parameters of routed experts that it adapts.

    ``parameters``: [elements] float32, the masters. ``gradient``: the same for gradients, added to by
    backward. ``compute``: A and B of each group in the base's type, as products use them.
    """

    def __init__(
        self,
        groups: Sequence[Mapping[str, tuple[int, int]]],
        *,
        rank: int | Sequence[int],
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
        start: InitialWeights = InitialWeights.DEFAULT,
        magnitudes: bool = False,
        stacked: Sequence[Stacked] = (),
    ) -> None:
        self._followers: list[Callable[[], None]] = []
        self.with_magnitudes = magnitudes
        ranks = (rank,) * len(groups) if isinstance(rank, int) else rank
        self.layout = Layout(groups, ranks, magnitudes, stacked)
        self.stacked = tuple(stacked)
        self.inward, elements = self.layout.inward, self.layout.elements
        self.parameters = nn.Parameter(lasting_zeros(elements, device))
        self.gradient = lasting_zeros(elements, device)
        self._stacks = self.layout.of(self.parameters.detach())
        self.gradients = self.layout.of(self.gradient)
        for path, pair in self.layout.by_path(self._stacks).items():
            a, b = initial_weights(path, seed, len(pair.a), pair.a.shape[1], len(pair.b), start)
            pair.a.copy_(a)
            if b is not None:
                pair.b.copy_(b)
        for one, pair_of_all in zip(stacked, self.layout.stacked(self.parameters.detach()), strict=True):
            a, _ = initial_weights(one.path, seed, one.rank, one.inputs, one.outputs, start, one.experts)
            pair_of_all.a.copy_(a.view_as(pair_of_all.a))
        self._copy = None if dtype == torch.float32 else self.parameters.detach().to(dtype)
        self.compute = self._stacks if self._copy is None else self.layout.of(self._copy)
        self.stacked_gradients = self.layout.stacked(self.gradient)
        self.stacked_values = self.layout.stacked(
            self.parameters.detach() if self._copy is None else self._copy
        )

    def refresh(self) -> None:
        """The masters have changed: bring the copies in the base's type up to date, and all that follows from them."""
        if self._copy is not None:
            self._copy.copy_(self.parameters.detach())
        for follow in self._followers:
            follow()

    def followed_by(self, follow: Callable[[], None]) -> None:
        """Call it whenever the masters have changed."""
        self._followers.append(follow)

    def squared_norm(self) -> Tensor:
        """[] float64: of this stage's gradients. On a CPU in parts that a cache holds: all at once in float64, they would
        take six times as long, most of it to get the memory."""
        if self.gradient.device.type != "cpu":
            norm: Tensor = torch.linalg.vector_norm(self.gradient, dtype=torch.float64)
            return norm.square()
        parts = (part.double() for part in torch.split(self.gradient, NORM_AT_ONCE))
        return torch.stack([part.dot(part) for part in parts]).sum()

    def forget_gradients(self) -> None:
        self.gradient.zero_()

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        pairs = self.layout.by_path(self.layout.of(flat))
        names = {name: view for path, pair in pairs.items() for name, view in pair.named(path).items()}
        for one, of_all in zip(self.stacked, self.layout.stacked(flat), strict=True):
            names |= dict(zip(peft_keys(one.file_path), of_all.as_filed(), strict=True))
        return names

    def to_files(self, flat: Tensor) -> Tensor:
        for pair in self.layout.stacked(flat):
            pair.to_files()
        return flat

    def from_files(self, flat: Tensor) -> Tensor:
        for pair in self.layout.stacked(flat):
            pair.from_files()
        return flat

    @property
    def bytes(self) -> int:
        """Of parameters, gradients and copies."""
        return (
            self.parameters.nbytes + self.gradient.nbytes + (0 if self._copy is None else self._copy.nbytes)
        )


def initial_weights(
    path: str,
    seed: int,
    rank: int,
    inputs: int,
    outputs: int,
    start: InitialWeights = InitialWeights.DEFAULT,
    matrices: int = 1,
) -> tuple[Tensor, Tensor | None]:
    """PEFT's start, float32 on the CPU: A [rank, inputs] is Kaiming uniform (a = sqrt 5), or gaussian with a deviation of
    1 / rank; B [outputs, rank] is zero (None). Of an orthogonal start both are random, and B A is zero.

    From the task's seed and the module's path alone, so the same on any number of stages and beside any
    neighbours. ``matrices``: so many A lie one below the other.
    """
    digest = hashlib.sha256(f"{seed}/{path}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") % 2**63)
    if start is InitialWeights.ORTHOGONAL:
        return _orthogonal(rank, inputs, outputs, generator)
    a = torch.empty(matrices * rank, inputs)
    if start is InitialWeights.GAUSSIAN:
        return nn.init.normal_(a, std=1 / rank, generator=generator), None
    if start is not InitialWeights.DEFAULT:
        raise ValueError(f"initLoraWeights {start.value} is not supported")
    return nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator), None


def _orthogonal(rank: int, inputs: int, outputs: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A mixes every second row of an orthogonal matrix, and B the others."""
    rows, _ = torch.linalg.qr(torch.randn(rank, rank, generator=generator))
    a = rows[0::2].T @ torch.randn(rank // 2, inputs, generator=generator)
    b = torch.randn(outputs, rank // 2, generator=generator) @ rows[1::2]
    return a / 10, b / 10


def peft_keys(path: str) -> tuple[str, str]:
    """Names of A and B in ``adapter_model.safetensors``."""
    return f"base_model.model.{path}.lora_A.weight", f"base_model.model.{path}.lora_B.weight"


def magnitude_key(path: str) -> str:
    """Name of DoRA's magnitudes there: PEFT has no ``.weight`` at its end."""
    return f"base_model.model.{path}.lora_magnitude_vector"


def expected_keys(paths: Iterable[str]) -> tuple[str, ...]:
    """All names in the file of an adapter on the modules ``paths`` of the whole model, sorted."""
    return tuple(sorted(key for path in paths for key in peft_keys(path)))


def padded(elements: int) -> int:
    return -(-elements // _ALIGNMENT) * _ALIGNMENT
