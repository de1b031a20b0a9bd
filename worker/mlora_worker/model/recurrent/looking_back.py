"""What layers that look back at earlier tokens have in common, over packed rows.

Linear modules, which may have adapters, see all tokens at once. What looks back, a causal convolution or a state, sees one
row at a time, in transformers' own arithmetic in torch, so a row's result is what it would be alone. On a GPU ``choice``
may give a module kernels that take all rows at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d, silu

from mlora_worker.model.attention import PackedRows

# x [1, tokens, channels], weight [channels, taps], bias [channels], whether SiLU comes after -> as x
Convolve = Callable[[Tensor, Tensor, Tensor | None, PackedRows, bool], Tensor]
# query and key [1, tokens, key heads, size], neither normed nor scaled; value [1, tokens, heads, size]; logarithm of the
# decay, float32, and beta [1, tokens, heads] -> as value
DeltaRule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, PackedRows], Tensor]
# c and b [1, tokens, heads, state], x [1, tokens, heads, size], logarithm of the decay, float32, [1, tokens, heads] -> as
# x: c times the state, which decays at each token and then gains b x
Scan = Callable[[Tensor, Tensor, Tensor, Tensor, PackedRows], Tensor]


class Kernels(NamedTuple):
    """What looks back in all packed rows at once; None: nothing does, and rows are taken one by one."""

    convolve: Convolve | None = None
    delta_rule: DeltaRule | None = None
    scan: Scan | None = None


class LookingBack:
    """What a module of transformers becomes: [1, tokens, size] -> the same, ``out_proj(finished(looked(seen), gate))`` of
    the parts of what comes in."""

    kernels = Kernels()
    scans = True  # whether a state goes through all of a row
    out_proj: nn.Module

    def forward(self, hidden_states: Tensor, *, packed: PackedRows, **_: Any) -> Tensor:
        gate, *seen = self.parts(hidden_states)
        out: Tensor = self.out_proj(self.finished(self.looked(seen, packed), gate, packed))
        return out

    @property
    def convolution(self) -> nn.Conv1d:
        raise NotImplementedError

    def widths(self) -> tuple[int, ...]:
        """Of all parts but the first, which is the gate."""
        raise NotImplementedError

    def parts(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """[1, tokens, its width] each."""
        raise NotImplementedError

    def looked(self, seen: Sequence[Tensor], packed: PackedRows) -> Tensor:
        """What looks back: [1, tokens, ...]."""
        raise NotImplementedError

    def finished(self, looked: Tensor, gate: Tensor, packed: PackedRows) -> Tensor:
        """-> [1, tokens, inner size]."""
        raise NotImplementedError


def convolved(module: LookingBack, x: Tensor, packed: PackedRows, *, then_silu: bool) -> Tensor:
    """[1, tokens, channels] -> the same: each channel's last tokens, with nothing before a row's first."""
    conv, convolve = module.convolution, module.kernels.convolve
    if convolve is not None:
        return convolve(x, conv.weight[:, 0], conv.bias, packed, then_silu)

    def of_row(row: Tensor) -> Tensor:
        out = conv1d(row.transpose(1, 2), conv.weight, conv.bias, padding=conv.padding, groups=conv.groups)
        out = out[..., : row.shape[1]].transpose(1, 2)
        return silu(out) if then_silu else out

    return by_row(of_row, packed, x)


def by_row(function: Callable[..., Tensor], packed: PackedRows, *whole: Tensor) -> Tensor:
    parts = (torch.split(one, list(packed.lengths), dim=1) for one in whole)
    return torch.cat([function(*row) for row in zip(*parts, strict=True)], dim=1)


def as_alone(function: Callable[[Tensor], Tensor], packed: PackedRows, x: Tensor) -> Tensor:
    """Element by element: how torch computes the last ones of a tensor on a CPU depends on how many there are."""
    return by_row(function, packed, x) if x.device.type == "cpu" else function(x)
