"""Whether rows are those of what shall be learnt. Pure."""

from __future__ import annotations

from mlora_worker.data.errors import DataError
from mlora_worker.data.training_rows.token_rows import TokenRows
from mlora_worker.protocol import DatasetFormat, FailureReason, Objective, Training


def check_objective(format: DatasetFormat, training: Training) -> None:
    """Raises DataError where the rows are not those of what shall be learnt."""
    preference = training.preference
    if preference is None:
        if format in _OBJECTIVE_OF:
            raise DataError(FailureReason.INVALID_SPEC, _OBJECTIVE_OF[format])
    elif format is not format_of(preference):
        raise DataError(
            FailureReason.INVALID_SPEC,
            f"training.objective.type is {preference.type.value}, which takes rows of dataset.format "
            f"{format_of(preference).value}, and the rows have format {format.value}",
        )


def format_of(preference: Objective) -> DatasetFormat:
    """There is one of each kind."""
    return DatasetFormat.PREFERENCE if preference.paired else DatasetFormat.UNPAIRED_PREFERENCE


# What to do about rows that the usual objective does not learn.
_OBJECTIVE_OF = {
    DatasetFormat.PREFERENCE: "the rows have a chosen and a rejected answer each: set training.objective.type to dpo, cpo, "
    "simpo or orpo; to learn the chosen answers alone, set dataset.format and dataset.fields",
    DatasetFormat.UNPAIRED_PREFERENCE: "the rows have an answer and a label each, whether it is desirable: set "
    "training.objective.type to kto; to learn all answers, whatever their label, set dataset.format to promptCompletion",
}


def check_labels(rows: TokenRows, *, of_evaluation: bool = False) -> None:
    """Raises DataError where answers with a label all have the same one: there is nothing to tell apart."""
    labels = rows.desirable
    if labels is None or labels.any() != labels.all():
        return
    found, other = ("true", "false") if labels.any() else ("false", "true")
    what, advice = "rows", f"add rows with the label {other}, or check dataset.fields.label"
    if of_evaluation:
        what = "rows of the evaluation"
        advice = "evaluate on more of them (a larger dataset.heldOut or evaluation.limit), or on others (evaluation.uri)"
    raise DataError(
        FailureReason.INVALID_SPEC,
        f"all {len(rows)} {what} have the label {found}, so there are no other answers to compare them with: {advice}",
    )
