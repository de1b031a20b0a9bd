"""What a report says of answers with a label, and what an operator is told that knows pairs alone."""

from __future__ import annotations

import pytest

from mlora_worker.coordinator.task.preference import preference_of
from mlora_worker.protocol import (
    REPORT_FORMAT,
    DataCounts,
    DatasetFormat,
    EvaluationRecord,
    Objective,
    PreferenceRecord,
    Report,
    TaskPhase,
    TaskReport,
)

KTO = Objective.model_validate({"type": "kto"})
ANSWERS = PreferenceRecord(chosen_reward=0.5, chosen_logps=-20.0, kl=0.25)
PAIRS = PreferenceRecord(
    chosen_reward=0.5, rejected_reward=-0.5, margin=1.0, accuracy=0.75, chosen_logps=-20.0, rejected_logps=-30.0
)  # fmt: skip


def report(record: PreferenceRecord, format: DatasetFormat) -> Report:
    evaluation = EvaluationRecord(step=2, loss=0.5, token_accuracy=0.5, tokens=7, preference=record)
    data = DataCounts(rows=2, used=2, format=format)
    told = TaskReport(
        uid="u",
        phase=TaskPhase.TRAINING,
        preference=record,
        evaluation=evaluation,
        best=evaluation,
        data=data,
    )
    return Report(run_id="r", sequence=1, plan_generation=1, ready=True, tasks=(told,))


@pytest.mark.parametrize(
    ("record", "kind", "format", "known"),
    [
        (ANSWERS, DatasetFormat.UNPAIRED_PREFERENCE, REPORT_FORMAT, True),
        (ANSWERS, DatasetFormat.UNPAIRED_PREFERENCE, 9, False),
        (ANSWERS, DatasetFormat.UNPAIRED_PREFERENCE, 7, False),
        (PAIRS, DatasetFormat.PREFERENCE, 9, True),
    ],
)
def test_a_reader_is_told_what_its_format_has(
    record: PreferenceRecord, kind: DatasetFormat, format: int, known: bool
) -> None:
    said = report(record, kind).as_understood_by(format)
    (told,) = Report.model_validate_json(said.to_json()).tasks
    assert told.data is not None
    assert told.evaluation is not None
    assert told.best is not None
    assert told.data.format == (kind if known else None)
    assert {told.preference, told.evaluation.preference, told.best.preference} == {record if known else None}
    assert told.evaluation.loss == 0.5


def test_each_label_has_means_over_its_own_answers_and_a_margin_where_both_are_there() -> None:
    found = preference_of((1.5, -0.5, 3.0, -60.0, -10.0), 4.0, KTO, 0.25)
    assert found == PreferenceRecord(
        chosen_reward=0.5, rejected_reward=-0.5, margin=1.0, chosen_logps=-20.0, rejected_logps=-10.0, kl=0.25
    )


@pytest.mark.parametrize(
    ("sums", "wanted"),
    [
        ((1.0, 0.0, 2.0, -40.0, 0.0), PreferenceRecord(chosen_reward=0.5, chosen_logps=-20.0, kl=0.0)),
        ((0.0, 1.0, 0.0, 0.0, -40.0), PreferenceRecord(rejected_reward=0.5, rejected_logps=-20.0, kl=0.0)),
    ],
)
def test_a_label_that_no_answer_has_is_left_out(sums: tuple[float, ...], wanted: PreferenceRecord) -> None:
    assert preference_of(sums, 2.0, KTO, 0.0) == wanted
    nothing = tuple(float("nan") * one if one else one for one in sums)
    assert preference_of((*nothing[:2], sums[2], *nothing[3:]), 2.0, KTO, 0.0) is None
