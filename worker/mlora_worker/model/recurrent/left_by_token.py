"""What a token leaves for the backward in a layer that carries a state, beside what all layers leave.

The state's arithmetic is torch's own, step by step, so autograd keeps most of what it passes through: float32 copies of all
that goes in, matrices of a chunk's tokens by each other, and the state at the end of each chunk. Counted are the tensors
that it keeps, a little more than were measured, so that an estimate before anything was measured is not too low.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from mlora_worker.model.recurrent.delta_net import PackedDeltaNet, PackedNextDeltaNet
from mlora_worker.model.recurrent.mamba import PackedFalconMamba, PackedMamba, PackedNemotronMamba

# A row is filled up to a whole number of chunks: rows of half a chunk and more count for twice as much at most.
_FILLED = 2
_DELTA_CHUNK = 64  # tokens, of transformers' gated delta rule
# Tensors of a token and a head that are kept: of a key's length, of a value's, of a chunk's; and states of a chunk.
_OF_KEYS, _OF_VALUES, _OF_CHUNKS, _OF_STATES = 10, 10, 7, 3
# Of Mamba: of a head's inside, of its state's length, of a chunk's; and states of a chunk.
_OF_INSIDE, _OF_LENGTHS, _OF_SCANS, _OF_ENDS = 8, 7, 5, 4
_CONVOLVED = 4  # tensors, in the model's type, on the way through the convolution


class LeftByToken(NamedTuple):
    """Numbers: in float32, and in the model's type."""

    wide: int
    own: int

    def bytes(self, width: int) -> int:
        """``width``: of the model's type."""
        return 4 * self.wide + width * self.own


def left_by_token(layer: nn.Module) -> LeftByToken | None:
    """Of a decoder layer. None: it has no such state. A short convolution (LFM2) looks back over few tokens, and leaves no
    more than attention does."""
    for module in layer.modules():
        if isinstance(module, PackedDeltaNet | PackedNextDeltaNet):
            return _of_delta_net(module)
        if isinstance(module, PackedMamba | PackedFalconMamba | PackedNemotronMamba):
            return _of_mamba(module)
    return None


def _of_delta_net(net: Any) -> LeftByToken:
    keys, values = net.head_k_dim, net.head_v_dim
    state = -(-keys * values // _DELTA_CHUNK)
    each = _OF_KEYS * keys + _OF_VALUES * values + _OF_CHUNKS * _DELTA_CHUNK + _OF_STATES * state
    return LeftByToken(_FILLED * net.num_v_heads * each, _CONVOLVED * (2 * net.key_dim + net.value_dim))


def _of_mamba(net: Any) -> LeftByToken:
    inside, length, chunk = net.intermediate_size // net.num_heads, net.ssm_state_size, net.chunk_size
    ends = -(-inside * length // chunk)
    each = _OF_INSIDE * inside + _OF_LENGTHS * length + _OF_SCANS * chunk + _OF_ENDS * ends
    return LeftByToken(_FILLED * net.num_heads * each, _CONVOLVED * net.conv_dim)
