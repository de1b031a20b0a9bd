"""What the sums of rows are worth: the loss of a pair or of one answer, from which the factor of each row's gradient
follows. Pure.

The last stage gives each row's sum of cross entropies, which is minus the log-probability of its answer. All that is here
works on these few numbers of each row, in float64. The gradient with regard to a sum is what every position of that row
is multiplied by; no logits are needed again, since each position's own gradient is kept already (``loss``).

With z the log-probability of an answer and r that under the reference, of c (chosen) and d (rejected), and b = beta:

dpo     m = (z_c - r_c) - (z_d - r_d).  sigmoid: -log s(b m).  hinge: max(0, 1 - b m).
        ipo: (m' - 1 / 2b)^2, with each answer's difference divided by its tokens.
        robust, with smoothing e: (-(1 - e) log s(b m) + e log s(-b m)) / (1 - 2e)
cpo     m = z_c - z_d, of ipo per token.  sigmoid: -(1 - e) log s(b m) - e log s(-b m).  hinge, ipo as above.
simpo   the same of m = z_c - z_d - gamma / b per token.
orpo    -b log s(o), with o the logarithm of the ratio of both answers' odds, from z per token.
kto     of one answer, with d = z - r.  kto: s(b (k - d)) if it is desirable, else s(b (d - k)), with k an estimate of the
        divergence from the reference, which has no gradient.  apo_zero_unpaired: s(-b d), else s(b d).  Each times the
        weight of its label.

To those of pairs comes, weighted, the mean cross entropy of the chosen rows' tokens: of their answers, or (orpo) of their
prompts, too. It is a mean over the tokens of a whole step, so its factor comes with the rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from mlora_worker.protocol import Objective, ObjectiveType, PreferenceLoss

# Of a pair: rewards of chosen and rejected, whether the first is higher, log-probabilities of both. Of one answer the same,
# 0 where it is that of the other label, and in the third place whether it is desirable.
REWARDS = 5
_LOG_HALF = -0.6931471805599453


@dataclass(frozen=True, slots=True)
class PairSums:
    """Of each of n pairs, float64 on one device."""

    chosen: Tensor  # [n] sum of cross entropies over the answer's tokens
    rejected: Tensor
    chosen_tokens: Tensor  # [n] tokens of that
    rejected_tokens: Tensor
    prompt: Tensor | None = None  # [n] sum over the tokens of the chosen row's prompt, where those are learnt
    reference: Tensor | None = None  # [n, 2] log-probabilities of both answers under the reference


@dataclass(frozen=True, slots=True)
class PairLosses:
    """Of each pair, or of each answer."""

    losses: Tensor  # [n], differentiable with regard to the sums
    rewards: Tensor  # [n, REWARDS]


@dataclass(frozen=True, slots=True)
class AnswerSums:
    """Of each of n answers that are desirable or not, float64 on one device."""

    sums: Tensor  # [n] of cross entropies over its tokens
    reference: Tensor  # [n] its log-probability under the reference
    desirable: Tensor  # [n] 1 where it is, else 0


def answer_losses(objective: Objective, answers: AnswerSums, kl: float) -> PairLosses:
    """``kl``: of the whole step, the estimate of the divergence from the reference."""
    logps, desirable = -answers.sums, answers.desirable
    ratios = logps - answers.reference
    beta = objective.temperature
    compared = ratios - kl if objective.loss is PreferenceLoss.KTO else ratios
    undesirable_weight, desirable_weight = objective.label_weights
    losses = torch.sigmoid(beta * compared * (1 - 2 * desirable))
    losses = losses * (desirable_weight * desirable + undesirable_weight * (1 - desirable))
    rewards = beta * ratios
    columns = [
        rewards * desirable, rewards * (1 - desirable), desirable, logps * desirable, logps * (1 - desirable),
    ]  # fmt: skip
    return PairLosses(losses, torch.stack(columns, dim=1).detach())


def pair_losses(objective: Objective, sums: PairSums, likelihood: float) -> PairLosses:
    """``likelihood``: what a chosen row's sum of cross entropies counts beside the loss of a pair: the objective's own
    weight, times pairs of the step over tokens that this mean is taken of."""
    chosen, rejected = -sums.chosen, -sums.rejected
    if _is_per_token(objective):
        chosen, rejected = chosen / sums.chosen_tokens, rejected / sums.rejected_tokens
    logps = chosen, rejected
    if objective.has_reference:
        assert sums.reference is not None, "the reference's log-probabilities are not known"
        chosen, rejected = chosen - sums.reference[:, 0], rejected - sums.reference[:, 1]
    losses = _losses(objective, chosen, rejected, sums)
    if likelihood:
        learnt = sums.chosen if sums.prompt is None else sums.chosen + sums.prompt
        losses = losses + likelihood * learnt
    beta = objective.temperature
    rewards = beta * chosen, beta * rejected
    columns = [*rewards, rewards[0] > rewards[1], *logps]
    return PairLosses(losses, torch.stack([column.detach().to(losses.dtype) for column in columns], dim=1))


def _is_per_token(objective: Objective) -> bool:
    """Whether log-probabilities are means over an answer's tokens. (That of dpo's ipo is one of differences.)"""
    match objective.type:
        case ObjectiveType.SIMPO | ObjectiveType.ORPO:
            return True
        case ObjectiveType.CPO:
            return objective.loss is PreferenceLoss.IPO
    return False


def _losses(objective: Objective, chosen: Tensor, rejected: Tensor, sums: PairSums) -> Tensor:
    beta, smoothing = objective.temperature, objective.smoothing
    if objective.type is ObjectiveType.ORPO:
        odds = (chosen - rejected) - (_log_complement(chosen) - _log_complement(rejected))
        return -beta * logsigmoid(odds)
    margin = chosen - rejected
    if objective.type is ObjectiveType.SIMPO:
        margin = margin - objective.gamma / beta
    match objective.loss:
        case PreferenceLoss.HINGE:
            return torch.relu(1 - beta * margin)
        case PreferenceLoss.IPO:
            if objective.type is ObjectiveType.DPO:
                margin = chosen / sums.chosen_tokens - rejected / sums.rejected_tokens
            return (margin - 1 / (2 * beta)) ** 2
        case PreferenceLoss.ROBUST:
            right, wrong = (1 - smoothing) * logsigmoid(beta * margin), smoothing * logsigmoid(-beta * margin)
            return (wrong - right) / (1 - 2 * smoothing)
    right, wrong = logsigmoid(beta * margin), logsigmoid(-beta * margin)
    return -(1 - smoothing) * right - smoothing * wrong if smoothing else -right


def _log_complement(logp: Tensor) -> Tensor:
    """log(1 - exp(logp)), exact at both ends. Where it is not taken, each branch gets a value that has a gradient."""
    far = logp < _LOG_HALF
    middle = torch.full_like(logp, _LOG_HALF)
    return torch.where(
        far,
        torch.log1p(-torch.exp(torch.where(far, logp, middle))),
        torch.log(-torch.expm1(torch.where(far, middle, logp))),
    )
