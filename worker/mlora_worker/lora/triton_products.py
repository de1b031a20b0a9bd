"""``Products`` on a GPU: two launches a group in forward and four in backward, however many segments there are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, overload
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from mlora_worker.lora import triton_kernels as kernels
from mlora_worker.lora.bound import BoundGroups, Placed, TaskProducts
from mlora_worker.lora.dropout import feature_keys
from mlora_worker.lora.groups import GroupSegment
from mlora_worker.lora.triton_rows import MEMBERS, RANK_TILE, Integers, StaticRows, joined, rows_of_task
from mlora_worker.lora.triton_tables import Placing, TableGroup, build_tables, fill
from mlora_worker.runtime.kernel_compiler import Launch, launch


@dataclass(frozen=True, slots=True)
class Tiles:
    """Sizes of blocks. Fixed, not tuned while running: another size may round otherwise, and a task's result may not
    depend on what was tuned beside whom. ``python -m bench gpu --tiles`` compares some.
    """

    tokens: int = 64
    columns: int = 64  # of the low-rank activations
    reduced: int = 64  # of the input or output in a sum over it
    wide: int = 128  # of the input or output where it is written
    span: int = 2048  # of the input or output that one program sums over
    chunk: int = 1024  # tokens that one program sums over
    warps: int = 4
    stages: int = 3


_ADD_BLOCK = 1024

HALF = Tiles()
# Without tensor cores a block of products needs more registers.
SINGLE = Tiles(tokens=32, columns=32, reduced=32, wide=64)


class TritonProducts:
    """``tiles``: sizes other than the type's own. ``launch``: what starts kernels, for those who count."""

    rows_per_block: int | None = None  # launches would cost more than a cache gives

    def __init__(self, tiles: Tiles | None = None, launch: Launch = launch) -> None:
        self._tiles, self._launch = tiles, launch
        self._widen = isinstance(kernels.low_kernel, InterpretedFunction)
        # Rows of tables of the tasks that are loaded, without dropout and with it.
        self._rows: WeakKeyDictionary[TaskProducts, dict[bool, StaticRows]] = WeakKeyDictionary()

    def prepare(self, groups: Sequence[Sequence[GroupSegment]]) -> Sequence[Sequence[GroupSegment]]:
        """Masks' token keys are best made on the CPU: they travel with the tables.

        Raises ValueError for a group of more modules than the kernels know.
        """
        if isinstance(groups, BoundGroups):
            return self._prepare_bound(groups)
        some = next((segment for segments in groups for segment in segments), None)
        if some is None:
            return groups
        tiles, rounds = self._tiles_for(some.a), [rounds_of(segments) for segments in groups]
        flat = [one for own in rounds for one in own]
        tables = iter(build_tables(flat, tile=tiles.tokens, chunk=tiles.chunk, device=some.a.device))
        return [next(tables) if len(own) == 1 else Rounds(tuple(next(tables) for _ in own)) for own in rounds]

    def _prepare_bound(self, bound: BoundGroups) -> Sequence[Sequence[GroupSegment]]:
        """As for lists, without a look at each segment."""
        placed = [one for one in bound.placed if one.task.parts]
        if not placed:
            return bound
        rows = joined([self._rows_of(one) for one in placed])
        some, rounds = placed[0].task.parts[0].a, int(rows.round.max()) + 1
        tiles, counts = self._tiles_for(some), [len(one.task.parts) for one in placed]
        ends = np.cumsum(counts)

        def make(numbers: Integers) -> list[GroupSegment]:
            owners = np.searchsorted(ends, numbers, side="right").tolist()
            return [
                placed[owner].segment(placed[owner].task.parts[int(number - ends[owner])])
                for owner, number in zip(owners, numbers, strict=True)
            ]

        spread = [(one.rows.start, one.rows.stop, one.weight) for one in placed]
        start, stop, weight = (np.repeat(np.array(own), counts) for own in zip(*spread, strict=True))
        placing = Placing(rows, rows.group * rounds + rows.round, start, stop, weight)
        keys = [(one.rows, one.token_keys) for one in placed if one.token_keys is not None]
        made: list[list[TableGroup]] = [[] for _ in range(len(bound))]
        for number, group in fill(
            placing, keys, make, tile=tiles.tokens, chunk=tiles.chunk, device=some.device
        ):
            made[number // rounds].append(group)
        return [own[0] if len(own) == 1 else Rounds(tuple(own)) if own else () for own in made]

    def _rows_of(self, placed: Placed) -> StaticRows:
        known, drops = self._rows.setdefault(placed.task, {}), placed.token_keys is not None
        if drops not in known:
            known[drops] = rows_of_task(placed.task, placed.token_keys)
        return known[drops]

    def forward(
        self, x: Tensor, outputs: Sequence[Tensor], segments: Sequence[GroupSegment]
    ) -> tuple[Tensor, ...]:
        """``outputs`` must be contiguous. Saves the low-rank activations, padded to the tile, in x's type."""
        if not segments:
            return ()
        group = self._prepared(segments)
        if isinstance(group, Rounds):
            return tuple(low for one in group.rounds for low in self.forward(x, outputs, one))
        _check(x, group, outputs)
        tiles, x = self._tiles_for(x), x.contiguous()
        low = x.new_empty(group.low_elements)
        masked = group.token_keys is not None
        keys, features = _keys(x, group)
        options = self._options(tiles, group)
        blocks = _ceil(group.widest, tiles.columns)
        spans = _ceil(x.shape[1], tiles.span)
        sums = _sums(low, spans)
        self._launch(
            kernels.low_kernel,
            (blocks, len(group.tiles), spans),
            x, low, sums, group.table, group.tiles, keys, features, x.shape[1], len(low),
            T=tiles.tokens, C=tiles.columns, W=tiles.reduced, SPAN=tiles.span, MASKED=masked, SPLIT=spans > 1,
            **options,
        )  # fmt: skip
        self._add_spans(sums, low, spans)
        self._launch(
            kernels.output_kernel,
            (len(group.tiles), _blocks(outputs, tiles.wide)),
            low, *_one_per_member(outputs), *_widths(outputs), group.table, group.tiles,
            T=tiles.tokens, W=tiles.wide, VECTOR=group.vector, **options,
        )  # fmt: skip
        return (low,)

    def backward(
        self,
        x: Tensor,
        grad_outputs: Sequence[Tensor],
        grad_x: Tensor | None,
        segments: Sequence[GroupSegment],
        saved: tuple[Tensor, ...],
    ) -> None:
        """``grad_x`` must be contiguous."""
        if not segments:
            return
        group = self._prepared(segments)
        if isinstance(group, Rounds):
            for one, low in zip(group.rounds, saved, strict=True):
                self.backward(x, grad_outputs, grad_x, one, (low,))
            return
        grads = [grad.contiguous() for grad in grad_outputs]
        _check(x, group, [*grads, *([] if grad_x is None else [grad_x])])
        tiles, x = self._tiles_for(x), x.contiguous()
        (low,) = saved
        grad_low = torch.empty_like(low)
        partial = low.new_empty(group.partial_elements, dtype=torch.float32)
        masked = group.token_keys is not None
        keys, features = _keys(x, group)
        inputs, widths = x.shape[1], _widths(grads)
        options = self._options(tiles, group)
        blocks = _ceil(group.widest_slab, tiles.columns)
        spans = _ceil(max(widths), tiles.span)
        sums = _sums(low, spans)
        self._launch(
            kernels.grad_low_kernel,
            (blocks * spans, len(grads), len(group.tiles)),
            *_one_per_member(grads), *widths, grad_low, sums, group.table, group.tiles, blocks, len(low),
            T=tiles.tokens, C=tiles.columns, W=tiles.reduced, SPAN=tiles.span, SPLIT=spans > 1, VECTOR=group.vector,
            **options,
        )  # fmt: skip
        self._add_spans(sums, grad_low, spans)
        if grad_x is not None:
            self._launch(
                kernels.grad_input_kernel,
                (len(group.tiles), _ceil(inputs, tiles.wide)),
                grad_low, grad_x, group.table, group.tiles, keys, features, inputs,
                T=tiles.tokens, W=tiles.wide, MASKED=masked, **options,
            )  # fmt: skip
        self._launch(
            kernels.partial_gradients_kernel,
            (
                _ceil(group.widest, tiles.columns),
                len(group.chunks),
                _blocks([*grads, x], tiles.reduced),
            ),
            x, *_one_per_member(grads), *widths, inputs, low, grad_low, partial, group.table, group.chunks,
            keys, features,
            CHUNK=tiles.chunk, T=tiles.tokens, C=tiles.columns, W=tiles.reduced, MASKED=masked,
            WIDEN=self._widen, num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
        self._launch(
            kernels.gradients_kernel,
            (group.widest // RANK_TILE, len(group), _blocks([*grads, x], tiles.wide)),
            partial, *widths, inputs, group.table,
            W=tiles.wide, VECTOR=group.vector, ALIGNED=group.aligned, num_warps=tiles.warps,
        )  # fmt: skip

    def _add_spans(self, sums: Tensor, low: Tensor, spans: int) -> None:
        if spans > 1:
            self._launch(
                kernels.add_spans_kernel,
                (_ceil(len(low), _ADD_BLOCK),),
                sums,
                low,
                len(low),
                spans,
                BLOCK=_ADD_BLOCK,
            )

    def _prepared(self, segments: Sequence[GroupSegment]) -> TableGroup | Rounds:
        prepared = segments if isinstance(segments, TableGroup | Rounds) else self.prepare([segments])[0]
        assert isinstance(prepared, TableGroup | Rounds)
        return prepared

    def _tiles_for(self, x: Tensor) -> Tiles:
        return self._tiles or (SINGLE if x.dtype == torch.float32 else HALF)

    def _options(self, tiles: Tiles, group: TableGroup) -> dict[str, Any]:
        return {
            "ALIGNED": group.aligned, "WIDEN": self._widen, "num_warps": tiles.warps, "num_stages": tiles.stages,
        }  # fmt: skip


@dataclass(frozen=True, eq=False)
class Rounds(Sequence[GroupSegment]):
    """Segments of which some lie on the same rows. Programs of one launch may not add to the same elements, so there is a
    launch for each round; as many as the most that one task has on a group, however many tasks there are."""

    rounds: tuple[TableGroup, ...]

    @overload
    def __getitem__(self, index: int) -> GroupSegment: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[GroupSegment]: ...
    def __getitem__(self, index: int | slice) -> GroupSegment | Sequence[GroupSegment]:
        return [segment for one in self.rounds for segment in one][index]

    def __len__(self) -> int:
        return sum(map(len, self.rounds))


def rounds_of(segments: Sequence[GroupSegment]) -> list[list[GroupSegment]]:
    """Each has one segment of any rows at most; at least one round."""
    rounds: list[list[GroupSegment]] = [[]]
    for _, same in groupby(segments, key=lambda segment: (segment.rows.start, segment.rows.stop)):
        for number, segment in enumerate(same):
            if number == len(rounds):
                rounds.append([])
            rounds[number].append(segment)
    return rounds


def _check(x: Tensor, group: TableGroup, tensors: Sequence[Tensor]) -> None:
    """Kernels read raw addresses: a wrong type or device would give nonsense, not an error."""
    wanted = (x.dtype, x.device)
    for tensor in (*group.operands, *tensors):
        if (tensor.dtype, tensor.device) != wanted:
            raise TypeError(f"{tensor.dtype} on {tensor.device} beside an input of {x.dtype} on {x.device}")
    for tensor in tensors:
        if not tensor.is_contiguous():
            raise ValueError("outputs and the input's gradient must be contiguous")
    if group.table.device != x.device:
        raise TypeError(f"tables on {group.table.device}, input on {x.device}")


def _keys(x: Tensor, group: TableGroup) -> tuple[Tensor, Tensor]:
    """Token keys and feature keys; where nobody drops out, tensors that no kernel reads."""
    if group.token_keys is None:
        return group.table, group.table
    return group.token_keys, feature_keys(x.shape[1], x.device)


def _one_per_member(tensors: Sequence[Tensor]) -> list[Tensor]:
    """One per member that the kernels know; those beyond the group's have no columns and are never touched."""
    return [*tensors, *[tensors[0]] * (MEMBERS - len(tensors))]


def _widths(tensors: Sequence[Tensor]) -> list[int]:
    return [*(tensor.shape[1] for tensor in tensors), *[0] * (MEMBERS - len(tensors))]


def _sums(low: Tensor, spans: int) -> Tensor:
    """[spans, elements of low] float32; where nothing is split, what no kernel writes."""
    return low if spans == 1 else low.new_empty(spans * len(low), dtype=torch.float32)


def _ceil(size: int, block: int) -> int:
    return -(-size // block)


def _blocks(tensors: Sequence[Tensor], size: int) -> int:
    return sum(_ceil(tensor.shape[1], size) for tensor in tensors)
