"""Dropout masks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mlora_worker.lora.dropout import DropoutMask, dropout_mask, keep, token_keys

CPU = torch.device("cpu")
WHOLE = slice(None)


def kept(mask: DropoutMask) -> Tensor:
    """[tokens, features] float: 1 where kept."""
    return (mask.bits(WHOLE) != 0).double()


def mask(
    probability: float = 0.1,
    seed: int = 5,
    step: int = 1,
    first_row: int = 0,
    lengths: tuple[int, ...] = (40, 25, 60),
    module: str = "model.layers.0.self_attn.q_proj",
    features: int = 96,
) -> DropoutMask:
    return dropout_mask(token_keys(seed, step, first_row, lengths), module, features, probability)


@pytest.mark.parametrize("probability", [0.01, 0.05, 0.5, 0.9])
def test_the_share_of_zeroed_elements_is_the_probability(probability: float) -> None:
    found = 1 - kept(mask(probability, lengths=(500,) * 4, features=1000)).mean().item()
    deviation = (probability * (1 - probability) / 2_000_000) ** 0.5
    assert abs(found - probability) < 4 * deviation


def test_the_mask_does_not_depend_on_how_the_rows_are_cut() -> None:
    whole = mask().bits(WHOLE)
    parts = [mask(lengths=(40,)), mask(lengths=(25, 60), first_row=1)]
    assert torch.equal(whole, torch.cat([part.bits(WHOLE) for part in parts]))


def test_chunks_give_the_same_bits_as_the_whole() -> None:
    big = mask(lengths=(300, 500), features=700)
    assert len(list(big.chunks())) > 2
    assert torch.equal(big.bits(WHOLE), torch.cat([big.bits(rows) for rows in big.chunks()]))


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 6},
        {"step": 2},
        {"first_row": 1},
        {"module": "model.layers.0.self_attn.k_proj"},
        {"module": "model.layers.10.self_attn.q_proj"},
    ],
)
def test_any_other_counter_gives_an_independent_mask(other: dict[str, object]) -> None:
    shape = {"lengths": (300,) * 3, "features": 500, "probability": 0.5}
    a, b = kept(mask(**shape)), kept(mask(**(shape | other)))  # type: ignore[arg-type]
    agreement = (a == b).double().mean().item()
    assert agreement == pytest.approx(0.5, abs=4 * 0.5 / 450_000**0.5)


@pytest.mark.parametrize("axis", [0, 1])
def test_tokens_and_features_are_not_correlated(axis: int) -> None:
    bits = kept(mask(0.2, lengths=(400, 400), features=800))
    values = (bits - 0.8) / (0.2 * 0.8) ** 0.5
    values = values if axis else values.T
    correlation = values @ values.T / values.shape[1]
    correlation.fill_diagonal_(0)
    # 800 x 800 / 2 pairs of 800 samples each: five standard deviations.
    assert correlation.abs().max().item() < 5.5 / 800**0.5
    assert correlation.square().mean().item() == pytest.approx(1 / 800, rel=0.05)
    # Shares per token (or feature) scatter as they should.
    assert values.mean(1).var().item() == pytest.approx(1 / 800, rel=0.25)


def test_runs_of_neighbours_are_not_correlated() -> None:
    values = kept(mask(0.5, lengths=(400, 400), features=800)) - 0.5
    for shifted in (
        values[1:] * values[:-1],
        values[:, 1:] * values[:, :-1],
        values[1:, 1:] * values[:-1, :-1],
    ):
        assert abs(shifted.mean().item()) < 4 * 0.25 / shifted.numel() ** 0.5


def test_a_mask_is_the_same_on_every_machine() -> None:
    """A checkpoint that is resumed elsewhere, or by a later version, must go on with the same masks."""
    rows = mask(0.5, lengths=(3,), features=8).bits(WHOLE)
    assert (rows != 0).int().tolist() == [
        [1, 0, 0, 1, 1, 1, 0, 1],
        [0, 0, 1, 1, 1, 0, 1, 0],
        [1, 0, 1, 0, 1, 1, 1, 0],
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_keep_zeroes_and_changes_nothing_else(dtype: torch.dtype) -> None:
    x = torch.randn(125, 96, dtype=torch.float64).to(dtype)
    x[0, 0] = torch.inf
    some = mask(0.3)
    wanted = torch.where(some.bits(WHOLE) != 0, x, torch.zeros((), dtype=dtype))
    assert torch.equal(keep(x, some.bits(WHOLE)), wanted)
