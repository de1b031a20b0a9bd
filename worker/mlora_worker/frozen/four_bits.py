"""4 bits a weight, by bitsandbytes: the same bytes and the same values as QLoRA has.

A block of 64 weights has its largest magnitude as scale and picks the nearest of 16 values for each. With double
quantisation the scales are 8-bit numbers, in blocks of 256.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mlora_worker.frozen.quantised import QuantisedWeight, at_once

_BLOCK, _BLOCK_OF_SCALES = 64, 256
_ASKS_THE_NETWORK = (
    "kernels"  # a package with which bitsandbytes would fetch code from a hub when it is imported
)
_ABSENT = object()


def available() -> bool:
    return importlib.util.find_spec("bitsandbytes") is not None


@cache
def _library() -> Any:
    """Imported as if that package were not there: what trains is what was installed."""
    kept = sys.modules.get(_ASKS_THE_NETWORK, _ABSENT)
    log = logging.getLogger("bitsandbytes.backends.cpu.ops")  # it advises to install it
    level = log.level
    sys.modules[_ASKS_THE_NETWORK] = None  # type: ignore[assignment]
    log.setLevel(logging.CRITICAL)
    try:
        from bitsandbytes import functional
    finally:
        log.setLevel(level)
        if kept is _ABSENT:
            del sys.modules[_ASKS_THE_NETWORK]
        else:
            sys.modules[_ASKS_THE_NETWORK] = kept  # type: ignore[assignment]
    return functional


class FourBitWeight(QuantisedWeight):
    def __init__(self, packed: Tensor, state: Any, dtype: torch.dtype) -> None:
        """``packed`` and ``state``: as bitsandbytes has them."""
        outputs, inputs = state.shape
        super().__init__((outputs, inputs), dtype)
        packed = packed.view(torch.uint8)
        self._state = state
        self.register_buffer("packed", packed)
        self.register_buffer("scales", state.absmax)
        if state.nested:
            self.register_buffer("scales_of_scales", state.state2.absmax)
            self.register_buffer("mean_scale", state.offset)

    def unpacked(self) -> Tensor:
        """As one row of whole bytes. For more rows the library's CPU kernel (0.50) begins a block with each, which is wrong
        where a row is not whole blocks, and for rows of an odd length it compiles code."""
        packed = self.get_buffer("packed").view(-1, 1)
        dense = torch.empty(2 * len(packed), dtype=self.dtype, device=packed.device)
        state = self._state
        whole = state.blocksize * (
            state.state2.blocksize if state.nested else 1
        )  # elements of a scale of scales
        step = max(1, at_once(packed.device) // whole) * whole
        for first in range(0, len(dense), step):
            last = min(first + step, len(dense))
            of_part = _part_of(state, first, last)
            # Without a name it is gone before the next part is made.
            dense[first:last] = _library().dequantize_4bit(packed[first // 2 : last // 2], of_part).view(-1)
        return dense[: math.prod(self.shape)].view(self.shape)


def _part_of(state: Any, first: int, last: int) -> Any:
    """Of the elements from ``first``, where a scale of scales begins, to ``last``."""
    kind, block = _library().QuantState, state.blocksize
    nested = state.state2
    if state.nested:
        scales = slice(first // block // nested.blocksize, math.ceil(last / block / nested.blocksize))
        nested = kind(
            absmax=nested.absmax[scales], blocksize=nested.blocksize, code=nested.code, dtype=nested.dtype
        )
    return kind(
        absmax=state.absmax[first // block : math.ceil(last / block)],
        shape=torch.Size((1, last - first)),
        code=state.code,
        blocksize=block,
        quant_type=state.quant_type,
        dtype=state.dtype,
        offset=state.offset,
        state2=nested,
    )


def nf4(matrix: Tensor, *, double: bool) -> FourBitWeight:
    packed, state = _library().quantize_4bit(
        matrix.detach(), blocksize=_BLOCK, compress_statistics=double, quant_type="nf4"
    )
    return FourBitWeight(packed, state, matrix.dtype)


def stored_four_bits(
    packed: Tensor, state: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device
) -> FourBitWeight:
    """As ``save_pretrained`` of transformers has written it: ``state`` by the names after the weight's."""
    found = _library().QuantState.from_dict(dict(state), device)
    return FourBitWeight(packed.to(device), found, dtype)


def four_bit_bytes(outputs: int, inputs: int, *, double: bool) -> int:
    numbers = outputs * inputs
    blocks = math.ceil(numbers / _BLOCK)
    scales = blocks + 4 * math.ceil(blocks / _BLOCK_OF_SCALES) + 4 if double else 4 * blocks
    return math.ceil(numbers / 2) + scales
