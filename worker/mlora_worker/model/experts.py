"""Layers whose feed-forward is a mixture of experts: where the parts lie, what the files call them, and their reading.

transformers keeps a layer's experts in two stacked tensors; files mostly have each expert's matrices by themselves. They
are read one by one, each straight into its place, so no stack is ever there beside its parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from mlora_worker.frozen.experts import Biases, CutRouter, FrozenExperts, Gated, SegmentTokens
from mlora_worker.frozen.grouped import grouped_where_it_can
from mlora_worker.frozen.weight import FrozenWeight
from mlora_worker.model.errors import UnsupportedModel
from mlora_worker.model.steady import in_parts

_BIAS = "_bias"
_SHARED_GATE = "shared_expert_gate"
MOST_EXPERTS = 4096  # of a layer: each of them is a module


class Parts(NamedTuple):
    """Of each expert, [out, in]; and of all together."""

    gate: Sequence[FrozenWeight]
    up: Sequence[FrozenWeight]
    down: Sequence[FrozenWeight]
    biases: Biases | None = None


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Of the parts of a layer that has routed experts, in transformers and in files."""

    block: str = "mlp"  # the mixture, in its layer; empty: the layer itself
    router: str = "gate"  # in the block
    active: str = "num_experts_per_tok"  # configuration field: how many a token goes through
    stored_block: str | None = None  # what files call the block; None: the same
    stored_router: str | None = None
    corrections: str | None = (
        None  # of choices: how they end in the model, and where files have them in the block
    )
    single: tuple[str, ...] = (
        "gate_proj",
        "up_proj",
        "down_proj",
    )  # of one expert in files; two: it has no gate
    # Of all of them, gate and up in one, if files have these; in a block.
    stacks: tuple[tuple[str, str], ...] = (("experts.gate_up_proj", "experts.down_proj"),)
    turned: bool = False  # files have stacks as [experts, in, out], which are [experts, out, in] in the model
    inward: bool = False  # stacks are [experts, in, out], in the model, too
    # Stacks are [experts, in, out], gate and up lie there in turns, and each has a bias beside it (gpt-oss).
    in_turns: bool = False
    # Words of ``target_modules`` that PEFT takes for the stacked experts and their router, whatever else has that name.
    in_peft: tuple[str, ...] = ()

    @property
    def gated(self) -> bool:
        return len(self.single) == 3

    @property
    def experts(self) -> str:
        """The experts, in their layer."""
        return _inside(self.block, "experts")

    def is_of_router(self, name: str) -> bool:
        """Whether ``name``, of a layer's own module, is the router or a part of it."""
        router = _inside(self.block, self.router)
        return name == router or name.startswith(f"{router}.")

    @property
    def blocks(self) -> tuple[str, ...]:
        """What files may call the block."""
        return tuple(dict.fromkeys((self.block, self.stored_block or self.block)))

    def stored(self, name: str) -> str:
        """What files may call ``name`` of a layer's own state instead."""
        if self.corrections is not None and name.endswith(f".{self.corrections}"):
            return f"{self.stored_block or self.block}.{self.corrections}"
        router = f"{_inside(self.block, self.router)}."
        if not name.startswith(router):
            return name
        block, own = self.stored_block or self.block, self.stored_router or self.router
        return f"{_inside(block, own)}.{name.removeprefix(router)}"


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """The routed experts of one layer."""

    path: str  # in the causal LM, such as model.layers.3.mlp.experts
    layer: int
    experts: int
    active: int  # of them, those that a token goes through
    hidden_size: int
    width: int  # of the inside of one expert
    in_peft: tuple[str, ...] = ()  # see ExpertNames
    gated: bool = True  # whether each has a gate beside up; adapters are possible on those that have one
    swapped: bool = False  # PEFT takes its [experts, in, out] for [experts, out, in], so A is behind B

    @property
    def inside(self) -> str:
        """The path in its layer, such as mlp.experts."""
        return self.path.partition(f".{self.layer}.")[2]

    @property
    def pattern(self) -> str:
        """The path with * for the layer."""
        return f"{self.path.removesuffix(f'.{self.layer}.{self.inside}')}.*.{self.inside}"

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """[out, in] of one expert's."""
        inner = 2 if self.gated else 1
        return ((self.width, self.hidden_size),) * inner + ((self.hidden_size, self.width),)


def _inside(block: str, name: str) -> str:
    return f"{block}.{name}" if block else name


def has_experts(layer: nn.Module, names: ExpertNames | None) -> bool:
    """Some types have dense layers, too."""
    return names is not None and any(path == names.experts for path, _ in layer.named_modules())


def stack_of(
    layer: nn.Module, names: ExpertNames | None, config: PretrainedConfig, index: int, prefix: str
) -> ExpertStack | None:
    """Of ``layer``, whose names begin with ``prefix``. Raises UnsupportedModel."""
    if names is None or not has_experts(layer, names):
        return None
    down: Tensor = layer.get_submodule(names.experts).down_proj  # type: ignore[assignment]
    experts, size = len(down), config.hidden_size
    active = getattr(config, names.active)
    if not isinstance(active, int) or not 1 <= active <= experts <= MOST_EXPERTS:
        raise UnsupportedModel(
            f"config.json of the base model cannot be used: a token takes {active} of {experts} experts; at least one, "
            f"at most all, and at most {MOST_EXPERTS} experts are possible"
        )
    width = down.shape[1] * down.shape[2] // size
    path = f"{prefix}{names.experts}"
    return ExpertStack(path, index, experts, active, size, width, names.in_peft, names.gated, names.inward)


def stored_names(stack: ExpertStack, names: ExpertNames, prefix: str) -> Iterator[str]:
    """All names under which files may have the tensors of ``stack``, and of the router beside it."""
    for block in names.blocks:
        ends = ("", _BIAS) if names.in_turns else ("",)
        yield from (
            f"{prefix}{_inside(block, one)}{end}" for pair in names.stacks for one in pair for end in ends
        )
        for router in {names.router, names.stored_router or names.router}:
            yield f"{prefix}{_inside(block, router)}.weight"
        if names.corrections is not None:
            yield f"{prefix}{_inside(block, names.corrections)}"
        for expert in range(stack.experts):
            yield from (f"{prefix}{_inside(block, 'experts')}.{expert}.{one}.weight" for one in names.single)


@dataclass(frozen=True, slots=True)
class MatrixReader:
    """How ``load`` reads: each answer is there once, and is the caller's."""

    has: Callable[[str], bool]
    matrix: Callable[
        [str, tuple[int, int]], FrozenWeight
    ]  # a tensor of the files, frozen as the stage wants it
    stack: Callable[[str, tuple[int, ...]], Tensor]  # as the files have it; not to be written to
    # The same of what files have turned, or not: [experts, in, out] or [experts, out, in] -> [experts, out, in].
    turned: Callable[[str, tuple[int, int, int]], Tensor]
    # Of a packed stack [experts, out, in]: what gives some rows of one expert; None: it is a plain one.
    packed: Callable[[str, tuple[int, int, int]], Callable[[int, slice], FrozenWeight] | None]
    own: Callable[[Tensor], Tensor]  # a copy of a part of a stack, in the stage's type
    freeze: Callable[[Tensor], FrozenWeight]  # the same, frozen


def read_experts(stack: ExpertStack, names: ExpertNames, prefix: str, reader: MatrixReader) -> Parts:
    """Of the layer whose names begin with ``prefix``: gate, up and down of each expert. Raises IncompleteModel."""
    for block, pair in product(names.blocks, names.stacks):
        both, narrow = (f"{prefix}{_inside(block, one)}" for one in pair)
        if any(reader.has(name + end) for name in (both, narrow) for end in ("", "_blocks")):
            return _of_stacks(both, narrow, stack, reader, names)

    def named(block: str, expert: int, one: str) -> str:
        return f"{prefix}{_inside(block, 'experts')}.{expert}.{one}.weight"

    own = next((one for one in names.blocks if reader.has(named(one, 0, names.single[0]))), names.blocks[-1])
    read = [
        [
            reader.matrix(named(own, expert, one), shape)
            for one, shape in zip(names.single, stack.matrices, strict=True)
        ]
        for expert in range(stack.experts)
    ]
    gate, *up, down = map(list, zip(*read, strict=True))
    return Parts(gate, up[0] if up else (), down)


def _of_stacks(both: str, narrow: str, stack: ExpertStack, reader: MatrixReader, names: ExpertNames) -> Parts:
    """One stack is there at a time."""
    count, width, size = range(stack.experts), stack.width, stack.hidden_size
    experts = len(count)
    if not names.gated:
        one = reader.stack(both, (experts, width, size))
        gate = [reader.freeze(one[at]) for at in count]
        one = reader.stack(narrow, (experts, size, width))
        return Parts(gate, (), [reader.freeze(one[at]) for at in count])
    if not names.in_turns:
        read = _inward(reader) if names.inward else reader.turned if names.turned else reader.stack
        wide = read(both, (experts, 2 * width, size))
        gate, up = ([reader.freeze(half[at]) for at in count] for half in (wide[:, :width], wide[:, width:]))
        del wide
        whole = read(narrow, (experts, size, width))
        return Parts(gate, up, [reader.freeze(whole[at]) for at in count])
    part = reader.packed(both, (experts, 2 * width, size))
    if part is not None:
        gate, up = ([part(at, slice(turn, None, 2)) for at in count] for turn in (0, 1))
    else:
        wide = reader.stack(both, (experts, size, 2 * width))
        gate, up = ([reader.freeze(wide[at, :, turn::2].T) for at in count] for turn in (0, 1))
        del wide
    part = reader.packed(narrow, (experts, size, width))
    if part is not None:
        down = [part(at, slice(None)) for at in count]
    else:
        whole = reader.stack(narrow, (experts, width, size))
        down = [reader.freeze(whole[at].T) for at in count]
    of_both = reader.stack(f"{both}{_BIAS}", (experts, 2 * width))
    biases = of_both[:, ::2], of_both[:, 1::2], reader.stack(f"{narrow}{_BIAS}", (experts, size))
    return Parts(gate, up, down, Biases(*map(reader.own, biases)))


def _inward(reader: MatrixReader) -> Callable[[str, tuple[int, int, int]], Tensor]:
    return lambda name, shape: reader.stack(name, (shape[0], shape[2], shape[1])).transpose(1, 2)


def freeze_experts(layer: nn.Module, names: ExpertNames, parts: Parts, segments: SegmentTokens) -> None:
    """Put frozen experts in the place of those of ``layer``, and have its router see each segment by itself."""
    block = layer.get_submodule(names.block)
    theirs: Any = block.experts
    frozen = FrozenExperts(
        parts.gate, parts.up, parts.down, _gated(theirs, names), segments, parts.biases, names.in_turns
    )
    block.experts = grouped_where_it_can(frozen)
    setattr(block, names.router, CutRouter(getattr(block, names.router), segments))
    if hasattr(block, _SHARED_GATE):
        block.forward = partial(_beside_shared, block, segments)


def _beside_shared(block: Any, segments: SegmentTokens, hidden: Tensor) -> Tensor:
    """What a block with a shared expert and a gate for it computes; the gate's sigmoid of each segment by itself: how torch
    computes the last elements of a tensor depends on how many there are."""
    flat = hidden.reshape(-1, hidden.shape[-1])
    shared = block.shared_expert(flat)
    _, weights, chosen = block.gate(flat)
    routed = block.experts(flat, chosen, weights)
    logits = block.shared_expert_gate(flat).split(segments.cut(len(flat), flat.device))
    y: Tensor = routed + torch.cat([each.sigmoid() for each in logits]) * shared
    return y.reshape(hidden.shape)


def _gated(theirs: Any, names: ExpertNames) -> Gated:
    if names.in_turns:

        def in_turns(gate: Tensor, up: Tensor) -> Tensor:
            gated: Tensor = theirs._apply_gate(torch.stack((gate, up), dim=-1).flatten(-2))
            return gated

        return partial(in_parts, in_turns)
    activation = theirs.act_fn
    if not names.gated:
        return activation  # type: ignore[no-any-return]
    return lambda gate, up: activation(gate) * up


def is_of_experts(name: str, names: ExpertNames | None) -> bool:
    """Whether ``name``, of a layer's own state, is one of the stacks that ``freeze_experts`` replaces."""
    return names is not None and name.startswith(f"{names.experts}.")
