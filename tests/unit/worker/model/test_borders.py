"""What crosses the border between two layers: its order, its width, and that it lies in memory as a layer leaves it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mlora_worker.model.borders import Border, SharedKeys, still_shared

WINDOWS = SharedKeys("sliding_attention", source=2, last=4, heads=2, size=3)
FULL = SharedKeys("full_attention", source=1, last=5, heads=1, size=5)
TOKENS = 7


def states(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def keys_of(shared: SharedKeys) -> tuple[Tensor, Tensor]:
    """As attention makes them: heads in front of tokens, in memory behind them."""
    made = states(2, 1, TOKENS, shared.heads, shared.size)
    return made[0].transpose(1, 2), made[1].transpose(1, 2)


@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize("shared", [(), (FULL,), (FULL, WINDOWS)], ids=len)
def test_what_is_packed_comes_out_as_it_was(copies: int, shared: tuple[SharedKeys, ...]) -> None:
    border = Border(copies * 4, copies, shared, inputs=6)
    hidden = states(1, TOKENS, 4) if copies == 1 else states(copies, 1, TOKENS, 4)
    keys = {one.kind: keys_of(one) for one in shared}
    packed = border.packed(hidden, keys)
    assert packed.shape == (TOKENS, border.learnt)
    whole = border.joined(packed, states(TOKENS, 9))
    assert whole.shape == (TOKENS, border.width)
    learnt, inputs = border.divided(whole)
    assert inputs is not None
    assert torch.equal(inputs, states(TOKENS, 9)[:, -6:]), "those of the layers behind are the last ones"
    out, found = border.unpacked(learnt)
    assert torch.equal(out, hidden)
    assert out.stride() == hidden.stride()
    assert found.keys() == keys.keys()
    for kind, pair in keys.items():
        for one, wanted in zip(found[kind], pair, strict=True):
            assert torch.equal(one, wanted)
            assert one.stride()[1:] == wanted.stride()[1:]


def test_hidden_states_that_travel_alone_are_not_copied() -> None:
    border, hidden = Border(4), states(TOKENS, 4)
    whole = border.joined(border.packed(border.unpacked(hidden)[0], {}), None)
    assert whole.data_ptr() == hidden.data_ptr()
    assert (border.learnt, border.width) == (4, 4)


@pytest.mark.parametrize(
    ("layer", "kept"),
    [(1, ()), (2, (FULL,)), (3, (WINDOWS, FULL)), (4, (WINDOWS, FULL)), (5, (FULL,)), (6, ())],
)
def test_keys_cross_borders_from_the_layer_that_made_them_to_the_last_that_uses_them(
    layer: int, kept: tuple[SharedKeys, ...]
) -> None:
    assert still_shared((WINDOWS, FULL), layer) == kept
