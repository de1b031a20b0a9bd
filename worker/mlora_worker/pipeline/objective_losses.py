"""From the sums of a microbatch's rows to the losses of its segments, each by its own task's objective.

A segment that learns answers has one sum, which is its loss. One that learns to prefer has a sum for each row, for its
objective (``model/objectives.py``), which compares it with a reference, or with the other row of a pair. Both rows of a
pair always are in the same microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mlora_worker.model.loss import supervised_of_parts
from mlora_worker.model.objectives import (
    REWARDS,
    AnswerSums,
    PairLosses,
    PairSums,
    answer_losses,
    pair_losses,
)
from mlora_worker.model.transfer import to_device
from mlora_worker.pipeline.results import OutOfOrder
from mlora_worker.protocol import Objective
from mlora_worker.stream.items import Segment


@dataclass(frozen=True, slots=True)
class SegmentLosses:
    losses: Tensor  # [segments] float64, differentiable with regard to the sums
    # [segments, REWARDS] float64, sums over pairs or answers; None: no task of them learns to prefer.
    rewards: Tensor | None = None


def summed_parts(segments: Sequence[Segment]) -> tuple[int, ...]:
    """Tokens of each part of the microbatch that has a sum of its own."""
    return tuple(part for segment in segments for part in _parts(segment))


def segment_losses_of(
    segments: Sequence[Segment], objectives: Sequence[Objective | None], sums: Tensor, labels: Tensor
) -> SegmentLosses:
    """``sums`` [parts]: of ``summed_parts``; ``labels`` [tokens], in the host's memory."""
    if not any(segment.prefers for segment in segments):
        return SegmentLosses(sums)
    counts = supervised_of_parts(labels, summed_parts(segments))
    losses, rewards, start = [], [], 0
    for segment, objective in zip(segments, objectives, strict=True):
        own = slice(start, start := start + len(_parts(segment)))
        if not segment.prefers:
            losses.append(sums[own].sum())
            rewards.append(sums.new_zeros(REWARDS))
            continue
        if objective is None:
            raise OutOfOrder(f"rows of task {segment.task} are preferences, and its objective takes none")
        loss, reward = _of_preferences(segment, objective, sums[own], counts[own])
        losses.append(loss)
        rewards.append(reward)
    return SegmentLosses(torch.stack(losses), torch.stack(rewards))


def answers_correct(segment: Segment, correct: Tensor) -> Tensor:
    """Tokens of the chosen or desirable answers that were predicted right, each as its row weighs; ``correct`` [parts]."""
    if segment.unpaired is not None:
        own = correct * _on(correct.device, segment.unpaired.desirable)
    else:
        assert segment.pairs is not None
        at, each = (0, 2) if segment.pairs.prompts is None else (1, 3)
        own = correct.view(-1, each)[:, at]
    if segment.row_weights is not None:
        own = own * _on(own.device, segment.row_weights)
    return own.sum()


def _parts(segment: Segment) -> Sequence[int]:
    pairs = segment.pairs
    if segment.unpaired is not None:
        return segment.lengths
    if pairs is None:
        return (segment.tokens,)
    if pairs.prompts is None:
        return segment.lengths
    cut: list[int] = []
    for prompt, chosen, rejected in zip(
        pairs.prompts, segment.lengths[::2], segment.lengths[1::2], strict=True
    ):
        cut += [prompt, chosen - prompt, rejected]
    return cut


def _of_preferences(
    segment: Segment, objective: Objective, sums: Tensor, counts: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Sums over its pairs or answers, each as it weighs: of losses, and of rewards [REWARDS]."""
    found = _of_answers(segment, objective, sums) or _of_pairs(segment, objective, sums, counts)
    losses, rewards = found.losses, found.rewards
    if segment.row_weights is not None:
        weights = _on(sums.device, segment.row_weights)
        losses, rewards = losses * weights, rewards * weights[:, None]
    return losses.sum(), rewards.sum(dim=0)


def _of_answers(segment: Segment, objective: Objective, sums: Tensor) -> PairLosses | None:
    unpaired = segment.unpaired
    if unpaired is None:
        return None
    reference, desirable = (_on(sums.device, given) for given in (unpaired.reference, unpaired.desirable))
    return answer_losses(objective, AnswerSums(sums, reference, desirable), unpaired.kl)


def _of_pairs(segment: Segment, objective: Objective, sums: Tensor, counts: Sequence[int]) -> PairLosses:
    pairs = segment.pairs
    assert pairs is not None
    numbers = _on(sums.device, counts)
    prompt: Tensor | None = None
    if pairs.prompts is None:
        (chosen, rejected), (of_chosen, of_rejected) = sums.view(-1, 2).T, numbers.view(-1, 2).T
    else:
        prompt, chosen, rejected = sums.view(-1, 3).T
        _, of_chosen, of_rejected = numbers.view(-1, 3).T
    reference = None
    if pairs.reference is not None:
        reference = _on(sums.device, pairs.reference).view(-1, 2)
    return pair_losses(
        objective,
        PairSums(chosen, rejected, of_chosen, of_rejected, prompt, reference),
        pairs.likelihood,
    )


def _on(device: torch.device, numbers: Sequence[float]) -> Tensor:
    return to_device(torch.tensor(numbers, dtype=torch.float64), device)
