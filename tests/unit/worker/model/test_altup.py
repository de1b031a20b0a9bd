"""What is done around the layers is done for each segment's tokens by themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlora_worker.frozen.experts import SegmentTokens
from mlora_worker.model.altup import CutAltUp, Gathered, Spread
from mlora_worker.model.layer_inputs import LayerInputs

OWN, BEFORE, SIZE = 5, 3, 4


class Counting(nn.Module):
    """As a matrix library whose results depend on how many rows there are."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + x.shape[-2])


class Decoder(nn.Module):
    """Of which the parts that make inputs of layers are used."""

    def get_per_layer_inputs(self, ids: Tensor) -> Tensor:
        return ids[..., None, None].expand(-1, -1, 2, SIZE).float()

    def project_per_layer_inputs(self, hidden: Tensor, found: Tensor) -> Tensor:
        return found + Counting()(hidden)[..., None, :]


class AltUp(nn.Module):
    def predict(self, hidden: Tensor) -> Tensor:
        return Counting()(hidden)

    def correct(self, predictions: Tensor, activated: Tensor) -> Tensor:
        return predictions + Counting()(activated)


def _projections() -> nn.ModuleList:
    return nn.ModuleList([Counting(), Counting()])


def _altup(segments: SegmentTokens) -> Callable[[Tensor], Tensor]:
    cut = CutAltUp(AltUp(), segments)
    return lambda hidden: cut.correct(cut.predict(hidden), hidden[0])


# What is made with the segments, and the dimension of its input that tokens are in.
MADE: dict[str, tuple[Callable[[SegmentTokens], Any], int]] = {
    "spread": (lambda segments: Spread(_projections(), segments), 0),
    "gathered": (lambda segments: Gathered(_projections(), segments), 2),
    "inputs of layers": (
        lambda segments: (
            lambda hidden: LayerInputs(Decoder(), segments)(torch.ones(len(hidden)).long(), hidden)
        ),
        0,
    ),
    "mixed copies": (_altup, 2),
}


@pytest.mark.parametrize("what", MADE)
def test_a_segment_has_the_bits_of_itself_alone(what: str) -> None:
    make, dim = MADE[what]
    tokens = BEFORE + OWN
    shape = (tokens, SIZE) if dim == 0 else (3, 1, tokens, SIZE)
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    segments = SegmentTokens()
    work = make(segments)
    segments.counts = (tokens,)
    together = work(whole)
    segments.counts = (BEFORE, OWN)
    found = work(whole)
    assert found.shape == together.shape
    assert not torch.equal(found, together), "it would be seen"
    own = whole.narrow(dim, BEFORE, OWN)
    segments.counts = (OWN,)
    alone = work(own)
    where = found.shape.index(tokens)
    assert torch.equal(found.narrow(where, BEFORE, OWN), alone)
