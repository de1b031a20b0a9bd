"""From sums of rows to losses of segments: who weighs what, and what is refused."""

from __future__ import annotations

import pytest
import torch

from mlora_worker.model.loss import IGNORED
from mlora_worker.model.objectives import AnswerSums, PairSums, answer_losses, pair_losses
from mlora_worker.pipeline.binding import position_weights
from mlora_worker.pipeline.objective_losses import answers_correct, segment_losses_of, summed_parts
from mlora_worker.pipeline.results import OutOfOrder
from mlora_worker.protocol import Objective, ObjectiveType
from mlora_worker.stream.items import Pairs, Segment, Unpaired

CPO = Objective(type=ObjectiveType.CPO)
SUMS = torch.tensor([5.0, 1.0, 2.0, 4.0, 3.0], dtype=torch.float64)
LABELS = torch.zeros(9, dtype=torch.int64)


def segment(lengths: tuple[int, ...], weights: tuple[float, ...] | None, pairs: Pairs | None) -> Segment:
    return Segment(
        task="t", step=1, lengths=lengths, first_row=0, weight=1.0, row_weights=weights, pairs=pairs,
        closes_step=True,
    )  # fmt: skip


ANSWERS = segment((3,), (0.25,), None)
PAIRS = segment((1, 2, 1, 2), (0.5, 1.0), Pairs())


def test_answers_have_one_sum_and_pairs_one_of_each_row_of_which_each_pair_weighs() -> None:
    assert summed_parts([ANSWERS, PAIRS]) == (3, 1, 2, 1, 2)
    found = segment_losses_of([ANSWERS, PAIRS], [None, CPO], SUMS, LABELS)
    wanted = pair_losses(CPO, PairSums(SUMS[1::2], SUMS[2::2], torch.ones(2), torch.full((2,), 2)), 0.0)
    weights = torch.tensor([0.5, 1.0], dtype=torch.float64)
    assert found.rewards is not None
    torch.testing.assert_close(found.losses, torch.stack([SUMS[0], (weights * wanted.losses).sum()]))
    torch.testing.assert_close(found.rewards[1], (weights[:, None] * wanted.rewards).sum(dim=0))
    assert not found.rewards[0].any()


def test_positions_weigh_as_their_row_but_in_pairs_whose_losses_weigh() -> None:
    found = position_weights([ANSWERS, PAIRS])
    assert found is not None
    assert found.tolist() == [0.25] * 3 + [1.0] * 6
    assert position_weights([PAIRS]) is None


def test_rows_of_a_pair_are_never_learnt_one_by_one() -> None:
    with pytest.raises(OutOfOrder, match="rows of task t are preferences, and its objective takes none"):
        segment_losses_of([ANSWERS, PAIRS], [None, None], SUMS, LABELS)


def test_a_prompt_that_is_learnt_has_a_sum_of_its_own_and_is_no_answer() -> None:
    own = segment((3, 2), None, Pairs(prompts=(2,), likelihood=1.0))
    assert summed_parts([own]) == (2, 1, 2)
    labels = torch.tensor([0, 0, 0, IGNORED, 0])
    orpo = Objective(type=ObjectiveType.ORPO)
    found = segment_losses_of([own], [orpo], SUMS[:3], labels)
    one = torch.ones(1, dtype=torch.float64)
    wanted = pair_losses(orpo, PairSums(SUMS[1:2], SUMS[2:3], one, one, SUMS[:1]), 1.0)
    torch.testing.assert_close(found.losses, wanted.losses)
    assert answers_correct(own, torch.tensor([2.0, 1.0, 0.0], dtype=torch.float64)) == 1.0


def test_answers_with_a_label_have_a_sum_each_and_the_desirable_ones_are_those_that_are_right() -> None:
    kto = Objective.model_validate({"type": "kto", "lossType": "apo_zero_unpaired", "desirableWeight": 2.0})
    unpaired = Unpaired(desirable=(True, False), reference=(-4.0, -1.5))
    own = segment((1, 2), (1.0, 0.5), None).model_copy(update={"unpaired": unpaired})
    assert summed_parts([ANSWERS, own]) == (3, 1, 2)
    found = segment_losses_of([ANSWERS, own], [None, kto], SUMS[:3], LABELS[:6])
    answers = AnswerSums(
        SUMS[1:3],
        torch.tensor([-4.0, -1.5], dtype=torch.float64),
        torch.tensor([1.0, 0.0], dtype=torch.float64),
    )
    wanted = answer_losses(kto, answers, 0.0)
    weights = torch.tensor([1.0, 0.5], dtype=torch.float64)
    assert found.rewards is not None
    torch.testing.assert_close(found.losses, torch.stack([SUMS[0], (weights * wanted.losses).sum()]))
    torch.testing.assert_close(found.rewards[1], (weights[:, None] * wanted.rewards).sum(dim=0))
    assert found.rewards[1][2] == 1.0
    assert position_weights([own]) is None
    assert answers_correct(own, torch.tensor([3.0, 4.0], dtype=torch.float64)) == 3.0
