"""Pairs become two sequences each, kept, cut, counted and dropped together."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlora_worker.data.errors import DataError
from mlora_worker.data.prepare import Prepared, TokenRow, prepare
from mlora_worker.data.training_rows.pairs import labels_for, likelihood_of, prompt_labels
from mlora_worker.data.training_rows.row_cache import RowCache
from mlora_worker.protocol import DatasetSpec, FailureReason, Objective, Training
from tests.unit.worker.data.test_prepare import CHATML, SOURCE

DPO = Objective.model_validate({"type": "dpo"})


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


TEXTS = {"prompt": "2+2 is", "chosen": " four", "rejected": " five"}
TURNS = {
    "prompt": [turn("user", "2+2?")],
    "chosen": [turn("assistant", "four")],
    "rejected": [turn("assistant", "five, no")],
}


@pytest.fixture(scope="module")
def tokenizer(make_tokenizer: Callable[..., Any]) -> Any:
    return make_tokenizer(
        CHATML, specials=["<|im_start|>", "<|im_end|>"], eos_token="<|im_end|>", pad_token="<|im_end|>"
    )


def run(
    tokenizer: Any, *rows: dict[str, Any], cache: RowCache | None = None, objective: Objective | None = DPO, **more: Any
) -> Prepared:  # fmt: skip
    dataset = {name: more.pop(name) for name in ("heldOut", "limit", "format", "fields") if name in more}
    spec = DatasetSpec.model_validate({"inline": "\n".join(map(json.dumps, rows)), **dataset})
    training = Training.model_validate({"maxSeqLength": 2048, **more}).model_copy(
        update={"objective": objective}
    )
    return prepare(spec.for_plan(), training, tokenizer, SOURCE, 100_000, cache=cache)


def words(tokenizer: Any, row: TokenRow) -> list[tuple[str, str]]:
    """Of each sequence, what is context and what is compared."""
    found, start = [], 0
    for length in row.lengths:
        ids, labels = row.ids[start : start + length], row.labels[start : start + length]
        first = 1 + int(np.argmax(labels >= 0))
        assert (labels[first - 1 : -1] == ids[first:]).all()
        assert labels[-1] < 0
        found.append((tokenizer.decode(ids[:first]), tokenizer.decode(ids[first:])))
        start += length
    return found


def test_turns_go_through_the_template_and_all_that_follows_the_prompt_is_compared(tokenizer: Any) -> None:
    prepared = run(tokenizer, TURNS)
    before = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert words(tokenizer, prepared.rows[0]) == [
        (before, "four<|im_end|>\n"),
        (before, "five, no<|im_end|>\n"),
    ]


def test_texts_stand_as_they_are_and_end(tokenizer: Any) -> None:
    assert words(tokenizer, run(tokenizer, TEXTS).rows[0]) == [
        ("2+2 is", " four<|im_end|>"),
        ("2+2 is", " five<|im_end|>"),
    ]


def test_a_row_counts_once_and_its_tokens_twice(tokenizer: Any) -> None:
    prepared = run(tokenizer, *[TURNS] * 4, TEXTS | {"rejected": ""}, heldOut=0.25)
    assert (prepared.counts.rows, prepared.counts.used, prepared.counts.held_out) == (5, 3, 1)
    assert prepared.counts.dropped == {"NoAnswer": 1}
    assert prepared.counts.tokens == 3 * len(prepared.rows[0].ids)
    assert sum(prepared.rows[0].lengths) == len(prepared.rows[0].ids)


def test_each_sequence_is_cut_by_itself(tokenizer: Any) -> None:
    lengths = run(tokenizer, TURNS).rows[0].lengths
    most = lengths[1] - 2
    cut = run(tokenizer, TURNS, maxSeqLength=most)
    assert cut.rows[0].lengths == (lengths[0], most)
    assert cut.counts.truncated == 1


def test_what_drops_one_answer_drops_the_pair(tokenizer: Any) -> None:
    longer = TURNS | {"rejected": [turn("assistant", "five " * 50)]}
    prepared = run(tokenizer, longer, TURNS, maxSeqLength=60, overlong="skip")
    assert prepared.counts.used == 1
    assert prepared.counts.dropped == {"TooLong": 1}


@pytest.mark.parametrize(
    "equal",
    [
        TEXTS | {"rejected": " four"},
        {"chosen": "2+2 is four", "rejected": "2+2 is four"},
        TURNS | {"rejected": TURNS["chosen"]},
    ],
)
def test_a_pair_of_equal_answers_is_dropped_and_only_such_pairs_fail_the_task(
    tokenizer: Any, equal: dict[str, Any]
) -> None:
    counts = run(tokenizer, TURNS, equal).counts
    assert (counts.used, counts.dropped) == (1, {"EqualAnswers": 1})
    assert counts.first_dropped == {"EqualAnswers": (2,)}
    with pytest.raises(
        DataError, match=r"EqualAnswers 2 .*the chosen and the rejected answer are the same"
    ) as caught:
        run(tokenizer, equal, equal)
    assert caught.value.reason is FailureReason.NO_TRAINABLE_ROWS


def test_a_chosen_list_without_an_assistants_turn_is_told_how_it_must_end(tokenizer: Any) -> None:
    asked = {"chosen": TURNS["prompt"], "rejected": [*TURNS["prompt"], *TURNS["rejected"]]}
    with pytest.raises(
        DataError, match=r"NoAnswer 1 .* each of the two answers of a pair, must end with an assistant's turn"
    ):
        run(tokenizer, asked)


def test_answers_that_differ_only_behind_the_cut_are_equal(tokenizer: Any) -> None:
    late = TEXTS | {"chosen": " four" * 50, "rejected": " four" * 50 + " five"}
    assert run(tokenizer, late).counts.used == 1
    with pytest.raises(DataError, match=r"raise training\.maxSeqLength where it cuts answers off"):
        run(tokenizer, late, maxSeqLength=40)


@pytest.mark.parametrize(
    ("row", "fields", "objective", "words"),
    [
        ({"chosen": "a b", "rejected": "a c"}, {"prompt": "chosen"}, DPO, "fields.chosen and fields.prompt name"),
        ({"completion": "a"}, {"prompt": "completion"}, None, "prompt and fields.completion name the same column"),
    ],
)  # fmt: skip
def test_two_fields_that_name_one_column_are_refused_once_the_rows_tell_their_format(
    tokenizer: Any, row: dict[str, Any], fields: dict[str, str], objective: Objective | None, words: str
) -> None:
    with pytest.raises(DataError, match=words) as caught:
        run(tokenizer, row, fields=fields, objective=objective)
    assert caught.value.reason is FailureReason.INVALID_SPEC


def test_rows_that_are_kept_on_disk_are_the_same(tokenizer: Any, tmp_path: Path) -> None:
    rows = [TURNS, TEXTS | {"prompt": "A", "chosen": "b c", "rejected": "d"}]
    kept = [run(tokenizer, *rows, cache=RowCache(tmp_path, "n")).rows for _ in range(2)]
    fresh = run(tokenizer, *rows).rows
    for some in kept:
        assert some.digest() == fresh.digest()
        assert some.splits is not None
        assert [row.split for row in some] == [row.split for row in fresh]
        assert all((one.labels == other.labels).all() for one, other in zip(some, fresh, strict=True))


def test_another_split_is_another_digest(tokenizer: Any) -> None:
    first = run(tokenizer, TEXTS | {"chosen": " a", "rejected": " b"})
    second = run(tokenizer, TEXTS | {"chosen": " b", "rejected": " a"})
    assert first.rows.digest() != second.rows.digest()


def test_rows_that_are_not_those_of_the_objective_are_refused(tokenizer: Any) -> None:
    chats = {"prompt": "a", "completion": "b"}
    for rows, objective, words in (
        (TURNS, None, "training.objective.type to dpo"),
        (chats, DPO, "no column 'chosen'"),
    ):
        with pytest.raises(DataError, match=words) as caught:
            run(tokenizer, rows, objective=objective)
        assert caught.value.reason in (FailureReason.INVALID_SPEC, FailureReason.INVALID_ROW)


def test_turns_need_a_template(make_tokenizer: Callable[..., Any]) -> None:
    bare = make_tokenizer(None, specials=["</s>"], eos_token="</s>", pad_token="</s>")
    assert words(bare, run(bare, TEXTS).rows[0])[0] == ("2+2 is", " four</s>")
    with pytest.raises(
        DataError, match="line 1 has turns, and the base model's tokenizer has no chat template"
    ):
        run(bare, TURNS)


def test_the_likelihood_of_chosen_rows_is_a_mean_over_tokens(tokenizer: Any) -> None:
    rows = list(run(tokenizer, TURNS, TEXTS).rows)
    answers = [int((row.labels[: row.split] >= 0).sum()) for row in rows]
    cpo = Objective.model_validate({"type": "cpo", "cpoAlpha": 0.5})
    assert likelihood_of(rows, cpo, None) == (2.0, pytest.approx(0.5 * 2 / sum(answers)))
    assert likelihood_of(rows, cpo, (1.0, 0.5))[1] == pytest.approx(0.5 * 1.5 / (answers[0] + answers[1] / 2))
    orpo = Objective.model_validate({"type": "orpo"})
    whole = sum(row.split - 1 for row in rows)
    assert likelihood_of(rows, orpo, None) == (2.0, pytest.approx(2 / whole))
    labels, row = labels_for(rows[0], orpo), rows[0]
    assert (labels[: row.split - 1] == row.ids[1 : row.split]).all()
    assert (labels[row.split :] == row.labels[row.split :]).all()
    assert (row.labels[: prompt_labels(row)] < 0).all()
