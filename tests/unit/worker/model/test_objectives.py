"""What the sums of pairs and of answers are worth, by numbers that can be worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mlora_worker.model.objectives import REWARDS, AnswerSums, PairSums, answer_losses, pair_losses
from mlora_worker.protocol import Objective

CHOSEN, REJECTED, REFERENCE = (-3.0, -8.0), (-5.0, -2.0), ((-4.0, -4.5), (-6.0, -3.0))
TOKENS = ((3, 5), (4, 1))  # of the chosen and the rejected answer


def column(numbers: Any, at: int) -> Tensor:
    return torch.tensor([row[at] for row in numbers], dtype=torch.float64)


def sums(*, prompt: Tensor | None = None) -> PairSums:
    made = [-torch.tensor(one, dtype=torch.float64) for one in (CHOSEN, REJECTED)]
    chosen, rejected = (one.requires_grad_() for one in made)
    reference = torch.tensor(REFERENCE, dtype=torch.float64)
    return PairSums(chosen, rejected, column(TOKENS, 0), column(TOKENS, 1), prompt, reference)


def losses(likelihood: float = 0.0, **objective: Any) -> list[float]:
    found: list[float] = pair_losses(Objective.model_validate(objective), sums(), likelihood).losses.tolist()
    return found


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


# Margins against the reference: (-3 + 4) - (-5 + 4.5) and (-8 + 6) - (-2 + 3).
MARGINS = (1.5, -3.0)


@pytest.mark.parametrize(
    ("objective", "wanted"),
    [
        ({"type": "dpo"}, [-log_sigmoid(0.1 * m) for m in MARGINS]),
        ({"type": "dpo", "lossType": "hinge", "beta": 2.0}, [max(0.0, 1 - 2 * m) for m in MARGINS]),
        (
            {"type": "dpo", "lossType": "ipo", "beta": 0.5},
            [(1.0 / 3 + 0.5 / 5 - 1) ** 2, (-2.0 / 4 - 1.0 / 1 - 1) ** 2],
        ),
        (
            {"type": "dpo", "lossType": "robust", "labelSmoothing": 0.2, "beta": 1.0},
            [(-0.8 * log_sigmoid(m) + 0.2 * log_sigmoid(-m)) / 0.6 for m in MARGINS],
        ),
        ({"type": "cpo"}, [-log_sigmoid(0.1 * m) for m in (2.0, -6.0)]),
        (
            {"type": "cpo", "labelSmoothing": 0.1},
            [-0.9 * log_sigmoid(0.1 * m) - 0.1 * log_sigmoid(-0.1 * m) for m in (2.0, -6.0)],
        ),
        ({"type": "simpo"}, [-log_sigmoid(0.1 * (m - 5)) for m in (-1.0 + 1.0, -2.0 + 2.0)]),
    ],
)
def test_losses_are_those_of_the_formula(objective: dict[str, Any], wanted: list[float]) -> None:
    assert losses(**objective) == pytest.approx(wanted, rel=1e-12)


def test_orpo_weighs_odds_per_token() -> None:
    def log_odds(logp: float) -> float:
        return logp - math.log(1 - math.exp(logp))

    wanted = [
        -0.1 * log_sigmoid(log_odds(-3 / 3) - log_odds(-5 / 5)),
        -0.1 * log_sigmoid(log_odds(-8 / 4) - log_odds(-2 / 1)),
    ]
    assert losses(type="orpo") == pytest.approx(wanted, rel=1e-12)


def test_the_likelihood_of_a_chosen_row_counts_beside_the_pair() -> None:
    bare, more = losses(type="cpo"), losses(type="cpo", likelihood=0.25)
    assert [b - a for a, b in zip(bare, more, strict=True)] == pytest.approx([0.25 * 3, 0.25 * 8])
    prompt = torch.tensor([1.0, 2.0], dtype=torch.float64)
    with_prompt = pair_losses(Objective.model_validate({"type": "orpo"}), sums(prompt=prompt), 0.25)
    without = losses(type="orpo", likelihood=0.25)
    assert (with_prompt.losses.tolist()[1] - without[1]) == pytest.approx(0.25 * 2)


def test_a_reference_that_is_not_known_is_never_taken_for_zero() -> None:
    bare = PairSums(*(torch.ones(1, dtype=torch.float64) for _ in range(4)))
    with pytest.raises(AssertionError, match="not known"):
        pair_losses(Objective.model_validate({"type": "dpo"}), bare, 0.0)


@pytest.mark.parametrize("kind", ["dpo", "cpo", "simpo", "orpo"])
def test_rewards_are_those_of_beta_and_stay_out_of_the_graph(kind: str) -> None:
    found = pair_losses(Objective.model_validate({"type": kind, "beta": 0.5}), sums(), 0.0).rewards
    assert found.shape == (2, REWARDS)
    assert not found.requires_grad
    chosen, rejected, accuracy, logps_chosen, logps_rejected = found[0].tolist()
    wanted = {"dpo": (0.5, -0.25), "cpo": (-1.5, -2.5)}.get(kind, (-0.5, -0.5))
    assert (chosen, rejected) == pytest.approx(wanted)
    assert accuracy == float(chosen > rejected)
    per_token = kind in ("simpo", "orpo")
    assert (logps_chosen, logps_rejected) == pytest.approx((-1, -1) if per_token else (-3, -5))


@pytest.mark.parametrize("logp", [-1e-9, -1e-3, -0.6931471805599453, -5.0, -800.0])
def test_odds_have_a_finite_gradient_at_both_ends(logp: float) -> None:
    own = torch.tensor([-logp], dtype=torch.float64, requires_grad=True)
    other = torch.ones(1, dtype=torch.float64)
    found = pair_losses(Objective.model_validate({"type": "orpo"}), PairSums(own, other, other, other), 0.0)
    found.losses.sum().backward()  # type: ignore[no-untyped-call]
    assert own.grad is not None
    assert bool(torch.isfinite(own.grad).all())


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize(
    ("objective", "wanted"),
    [
        ({"lossType": "apo_zero_unpaired"}, [sigmoid(-0.1 * 1.0), sigmoid(0.1 * -3.0)]),
        ({}, [sigmoid(0.1 * (0.5 - 1.0)), sigmoid(0.1 * (-3.0 - 0.5))]),
        (
            {"beta": 2.0, "desirableWeight": 3.0, "undesirableWeight": 0.0},
            [3.0 * sigmoid(2.0 * (0.5 - 1.0)), 0.0],
        ),
    ],
)
def test_an_answer_is_compared_with_its_reference_and_with_the_estimate(
    objective: dict[str, Any], wanted: list[float]
) -> None:
    """Log-probabilities -3 (desirable) and -8, under the reference -4 and -5; an estimate of 0.5."""
    sums = -torch.tensor(CHOSEN, dtype=torch.float64)
    answers = AnswerSums(
        sums.requires_grad_(),
        torch.tensor([-4.0, -5.0], dtype=torch.float64),
        torch.tensor([1.0, 0.0], dtype=torch.float64),
    )
    kto = Objective.model_validate({"type": "kto", **objective})
    found = answer_losses(kto, answers, 0.5)
    assert found.losses.tolist() == pytest.approx(wanted)
    beta = kto.temperature
    assert found.rewards.tolist() == [
        pytest.approx([beta * 1.0, 0.0, 1.0, -3.0, 0.0]), pytest.approx([0.0, beta * -3.0, 0.0, 0.0, -8.0]),
    ]  # fmt: skip
    assert not found.rewards.requires_grad
    (slopes,) = torch.autograd.grad(found.losses.sum(), sums)
    # A higher sum is a lower log-probability: worse for what is desirable, better for what is not.
    assert slopes[0] > 0
    assert (slopes[1] < 0) == (wanted[1] > 0)
