"""What of a token crosses the border between two layers, where later layers need more than its hidden state. Pure.

All of it is one row of numbers, so that a stage is still given one tensor and gives one: first what gradients come back
for (the hidden state, in all its copies; then keys and values that layers behind the border share), then what is constant
(the inputs that the layers behind it have for themselves).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

KeysAndValues = tuple[Tensor, Tensor]  # each [1, heads, tokens, size]


@dataclass(frozen=True, slots=True)
class SharedKeys:
    """Keys and values of layer ``source``, which later layers of its kind use as they are; ``last`` is the last one."""

    kind: str
    source: int
    last: int
    heads: int
    size: int  # of a head

    @property
    def width(self) -> int:
        """Numbers of a token's keys, and as many of its values."""
        return self.heads * self.size


@dataclass(frozen=True, slots=True)
class Border:
    """Numbers of a token. ``hidden``: of all copies of its hidden state. ``inputs``: of the layers behind the border."""

    hidden: int
    copies: int = 1
    shared: tuple[SharedKeys, ...] = ()
    inputs: int = 0

    @property
    def learnt(self) -> int:
        """That gradients come back for; they are the first ones."""
        return self.hidden + 2 * sum(one.width for one in self.shared)

    @property
    def width(self) -> int:
        return self.learnt + self.inputs

    def divided(self, whole: Tensor) -> tuple[Tensor, Tensor | None]:
        """[tokens, width] -> what gradients come back for [tokens, learnt], and the layers' inputs, if there are any."""
        if not self.inputs:
            return whole, None
        return whole[:, : self.learnt], whole[:, self.learnt :]

    def joined(self, learnt: Tensor, inputs: Tensor | None) -> Tensor:
        """[tokens, width]. ``inputs``: those of more layers, perhaps; the last ones are of these."""
        if not self.inputs:
            return learnt
        assert inputs is not None
        return torch.cat([learnt, inputs[:, -self.inputs :]], dim=1)

    def unpacked(self, learnt: Tensor) -> tuple[Tensor, dict[str, KeysAndValues]]:
        """[tokens, learnt] -> hidden states as layers take them, and keys and values by kind. Each lies in memory as a
        layer would have left it, since products may take other paths for other layouts."""
        if not self.shared and self.copies == 1:
            return learnt.contiguous()[None], {}
        tokens = len(learnt)
        widths = [self.hidden, *(one.width for one in self.shared for _ in "kv")]
        hidden, *rest = (part.contiguous() for part in torch.split(learnt, widths, dim=1))
        heads = [(one.heads, one.size) for one in self.shared for _ in "kv"]
        each = [part.view(1, tokens, *sizes).transpose(1, 2) for part, sizes in zip(rest, heads, strict=True)]
        pairs = zip(each[::2], each[1::2], strict=True)
        keys = {one.kind: pair for one, pair in zip(self.shared, pairs, strict=True)}
        if self.copies == 1:
            return hidden[None], keys
        return hidden.view(tokens, self.copies, -1).transpose(0, 1).contiguous()[:, None], keys

    def packed(self, hidden: Tensor, keys: dict[str, KeysAndValues]) -> Tensor:
        """The other way round: [tokens, learnt]."""
        if not self.shared and self.copies == 1:
            return hidden[0]
        tokens = hidden.shape[-2]
        flat = hidden[0] if self.copies == 1 else hidden[:, 0].transpose(0, 1).reshape(tokens, -1)
        parts = [part.transpose(1, 2).reshape(tokens, -1) for one in self.shared for part in keys[one.kind]]
        return torch.cat([flat, *parts], dim=1)


def still_shared(shared: Iterable[SharedKeys], layer: int) -> tuple[SharedKeys, ...]:
    """Of ``shared``, those that were made before ``layer`` and that it or a later one uses."""
    return tuple(one for one in shared if one.source < layer <= one.last)
