"""Answers with a label become one sequence each, kept with their label, and are refused where all have the same one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlora_worker.data.errors import DataError
from mlora_worker.data.objective_rows import check_labels
from mlora_worker.data.training_rows.row_cache import RowCache
from mlora_worker.data.training_rows.row_files import open_files, rows_in
from mlora_worker.protocol import FailureReason, Objective
from tests.unit.worker.data.test_prepare import CHATML
from tests.unit.worker.data.test_prepare_pairs import DPO, TURNS, run, words

KTO = Objective.model_validate({"type": "kto", "lossType": "apo_zero_unpaired"})
GOOD = {"prompt": "2+2 is", "completion": " four", "label": True}
BAD = {"prompt": "2+2 is", "completion": " five", "label": False}
CHAT = {
    "prompt": [{"role": "user", "content": "2+2?"}],
    "completion": [{"role": "assistant", "content": "four"}],
    "label": True,
}


@pytest.fixture(scope="module")
def tokenizer(make_tokenizer: Callable[..., Any]) -> Any:
    return make_tokenizer(
        CHATML, specials=["<|im_start|>", "<|im_end|>"], eos_token="<|im_end|>", pad_token="<|im_end|>"
    )


def test_an_answer_is_all_that_follows_its_prompt(tokenizer: Any) -> None:
    prepared = run(tokenizer, GOOD, BAD, CHAT, objective=KTO)
    assert [words(tokenizer, row) for row in prepared.rows] == [
        [("2+2 is", " four<|im_end|>")],
        [("2+2 is", " five<|im_end|>")],
        [("<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n", "four<|im_end|>\n")],
    ]
    assert [row.desirable for row in prepared.rows] == [True, False, True]
    assert prepared.counts.format is not None
    assert prepared.counts.format.value == "unpairedPreference"


def test_rows_that_are_kept_on_disk_have_their_labels(tokenizer: Any, tmp_path: Path) -> None:
    rows = [GOOD, BAD, CHAT, BAD]
    kept = [run(tokenizer, *rows, cache=RowCache(tmp_path, "n"), objective=KTO).rows for _ in range(2)]
    fresh = run(tokenizer, *rows, objective=KTO).rows
    for some in kept:
        assert some.digest() == fresh.digest()
        assert [row.desirable for row in some] == [True, False, True, False]
        assert some.splits is None
    (folder,) = [path.parent for path in tmp_path.glob("*/*/desirable.u1")]
    with open_files(folder) as files:  # as a process hands them to another one
        assert [row.desirable for row in rows_in(files, None)] == [True, False, True, False]


def test_a_pair_of_rows_kept_on_disk_has_splits_and_no_labels(tokenizer: Any, tmp_path: Path) -> None:
    rows = run(tokenizer, *[TURNS] * 4, cache=RowCache(tmp_path, "n"), objective=DPO).rows
    assert rows.splits is not None
    assert rows.desirable is None


def test_another_label_is_another_digest(tokenizer: Any) -> None:
    rows = [run(tokenizer, GOOD | {"label": label}, objective=KTO).rows for label in (True, False)]
    assert rows[0].digest() != rows[1].digest()


@pytest.mark.parametrize(
    ("row", "objective", "message"),
    [
        (GOOD, None, "a label each, whether it is desirable: set training.objective.type to kto"),
        (GOOD, DPO, "has no column 'chosen'"),
        (TURNS, KTO, "has no column 'completion'"),
        (GOOD | {"label": "maybe"}, KTO, "column 'label' is text, not true or false"),
    ],
)
def test_rows_that_are_not_those_of_the_objective_are_refused(
    tokenizer: Any, row: dict[str, Any], objective: Objective | None, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        run(tokenizer, row, objective=objective)


def test_another_format_than_that_of_the_objective_is_refused(tokenizer: Any) -> None:
    with pytest.raises(DataError, match=r"is kto, which takes rows of .* unpairedPreference"):
        run(tokenizer, TURNS, objective=KTO, format="preference")


@pytest.mark.parametrize(("row", "label", "other"), [(GOOD, "true", "false"), (BAD, "false", "true")])
def test_answers_that_all_have_one_label_are_refused_by_it(
    tokenizer: Any, row: dict[str, Any], label: str, other: str
) -> None:
    rows = run(tokenizer, row, row, objective=KTO).rows
    message = f"all 2 rows have the label {label}, .* add rows with the label {other}"
    with pytest.raises(DataError, match=message) as caught:
        check_labels(rows)
    assert caught.value.reason is FailureReason.INVALID_SPEC
    check_labels(run(tokenizer, GOOD, BAD, objective=KTO).rows)
    check_labels(run(tokenizer, TURNS).rows)
    with pytest.raises(DataError, match=r"all 2 rows of the evaluation have .*a larger dataset\.heldOut"):
        check_labels(rows, of_evaluation=True)


def test_a_csv_has_words_for_labels(tokenizer: Any) -> None:
    rows = run(tokenizer, GOOD | {"label": "TRUE"}, BAD | {"label": "false"}, objective=KTO).rows
    assert [row.desirable for row in rows] == [True, False]
