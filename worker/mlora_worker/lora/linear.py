"""The modules that take the frozen linears' places in the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from mlora_worker.frozen.experts import Additions
from mlora_worker.frozen.linear import FrozenLinear
from mlora_worker.lora.function import GroupedLinears, frozen_product
from mlora_worker.lora.groups import GroupSegment, Products
from mlora_worker.lora.magnitudes import SegmentMagnitudes


@dataclass(slots=True)
class Bound:
    """The microbatch whose products are added now: the rows of each task; per input group its segments, and what
    multiplies outputs; and what is added to routed experts. Set before each forward.

    Backward uses what forward saw, so microbatches may be in flight at the same time.
    """

    tasks: Sequence[slice] = ()
    groups: Sequence[Sequence[GroupSegment]] = ()
    magnitudes: Sequence[Sequence[SegmentMagnitudes]] = ()
    # By path, of each segment.
    experts: Mapping[str, Sequence[Additions | None]] = field(default_factory=dict)

    def clear(self) -> None:
        self.tasks, self.groups, self.magnitudes, self.experts = (), (), (), {}


class InputGroup:
    """Frozen linears that read the same input, in the order in which the model calls them."""

    def __init__(
        self,
        index: int,
        paths: Sequence[str],
        linears: Sequence[FrozenLinear],
        products: Products,
        bound: Bound,
    ) -> None:
        self.paths = tuple(paths)  # in the whole model
        self.shapes = tuple((one.in_features, one.out_features) for one in linears)
        self.weights = tuple(one.weight for one in linears)
        self.biases = tuple(one.bias for one in linears)
        self._index, self._products, self._bound = index, products, bound
        self._anchor = torch.zeros((), requires_grad=True)
        self._input: Tensor | None = None  # whose outputs are ready
        self._ready: dict[int, Tensor] = {}

    @property
    def name(self) -> str:
        """Of the group, for its dropout masks: the path of its first module."""
        return self.paths[0]

    def output(self, position: int, x: Tensor) -> Tensor:
        """[..., out] of module ``position``. The first module that is called computes those of all."""
        if self._input is x and position in self._ready:
            y = self._ready.pop(position)
            if not self._ready:
                self._input = None
            return y
        segments = self._bound.groups[self._index] if self._bound.groups else ()
        if not segments and not (torch.is_grad_enabled() and x.requires_grad):
            weight, bias = self.weights[position], self.biases[position]
            return frozen_product(x, self._products, weight, bias, self._bound.tasks)
        magnitudes = self._bound.magnitudes[self._index] if self._bound.magnitudes else ()
        outputs = GroupedLinears.apply(
            x,
            self._anchor,
            self._products,
            segments,
            self.weights,
            self.biases,
            magnitudes,
            self._bound.tasks,
        )
        self._ready = dict(enumerate(outputs))
        y = self._ready.pop(position)
        self._input = x if self._ready else None
        return y

    def forget(self) -> None:
        """Drop outputs that nobody came for, since the forward failed: a whole graph hangs on them."""
        self._input, self._ready = None, {}


class AdaptedLinear(nn.Module):
    """A frozen linear plus the low-rank products of the microbatch that runs now."""

    def __init__(self, group: InputGroup, position: int, base: FrozenLinear) -> None:
        super().__init__()
        self.weight, self.bias = base.weight, base.bias
        self.in_features, self.out_features = base.in_features, base.out_features
        self._group, self._position = group, position

    def forward(self, x: Tensor) -> Tensor:
        return self._group.output(self._position, x)


@dataclass(frozen=True, slots=True)
class _Place:
    parent: nn.Module
    name: str


def adapt_linears(
    root: nn.Module,
    linears: Mapping[str, FrozenLinear],
    groups: Sequence[Sequence[str]],
    products: Products,
    bound: Bound,
) -> tuple[InputGroup, ...]:
    """Put an AdaptedLinear in the place of each of ``linears`` below ``root``. ``groups``: their paths by input."""
    places = {
        id(child): _Place(parent, name)
        for parent in root.modules()
        for name, child in parent.named_children()
        if isinstance(child, FrozenLinear)
    }
    made = []
    for index, paths in enumerate(groups):
        modules = [linears[path] for path in paths]
        group = InputGroup(index, paths, modules, products, bound)
        for position, module in enumerate(modules):
            place = places[id(module)]
            setattr(place.parent, place.name, AdaptedLinear(group, position, module))
        made.append(group)
    return tuple(made)
