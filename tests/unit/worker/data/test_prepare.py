from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlora_worker.data.errors import DataError
from mlora_worker.data.prepare import IGNORED, Prepared, labels_of, prepare
from mlora_worker.protocol import Dataset, DatasetFormat, FailureReason, Overlong, StorageAccess, Training
from mlora_worker.storage.errors import StorageError
from mlora_worker.storage.sources import open_sources
from mlora_worker.storage.store import open_store

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SOURCE = open_sources(open_store(StorageAccess(), allow_files=True), StorageAccess())


@pytest.fixture(scope="module")
def tokenizer(make_tokenizer: Callable[..., Any]) -> Any:
    return make_tokenizer(
        CHATML, specials=["<|im_start|>", "<|im_end|>"], eos_token="<|im_end|>", pad_token="<|im_end|>"
    )


def pairs(*rows: tuple[str, str | None]) -> Dataset:
    return Dataset(
        inline="\n".join(json.dumps({"prompt": prompt, "completion": answer}) for prompt, answer in rows)
    )


def run(dataset: Dataset, tokenizer: Any, max_positions: int = 100_000, **training: Any) -> Prepared:
    return prepare(
        dataset, Training(**{"max_seq_length": 2048, **training}), tokenizer, SOURCE, max_positions
    )


def failure(dataset: Dataset, tokenizer: Any, **settings: Any) -> DataError:
    with pytest.raises(DataError) as caught:
        run(dataset, tokenizer, **settings)
    return caught.value


def test_labels_are_the_next_supervised_tokens(tokenizer: Any) -> None:
    (row,) = run(pairs(("2+2?", "It is four.")), tokenizer).rows
    assert row.ids.dtype == row.labels.dtype == np.int32
    assert row.ids.shape == row.labels.shape
    learnt = row.labels != IGNORED
    assert tokenizer.decode(row.labels[learnt]) == "It is four.<|im_end|>"
    assert (row.labels[:-1][learnt[:-1]] == row.ids[1:][learnt[:-1]]).all()
    assert tokenizer.decode(row.ids[: int(learnt.argmax()) + 1]).endswith("<|im_start|>assistant\n")


@given(st.lists(st.tuples(st.integers(0, 99), st.booleans()), min_size=1, max_size=30))
def test_each_label_is_its_successor_if_that_is_supervised_and_else_ignored(
    tokens: list[tuple[int, bool]],
) -> None:
    ids = np.array([token for token, _ in tokens], np.int32)
    labels = labels_of(ids, np.array([learnt for _, learnt in tokens]))
    for place, label in enumerate(labels.tolist()):
        after = tokens[place + 1] if place + 1 < len(tokens) else (0, False)
        assert label == (after[0] if after[1] else IGNORED)


def test_counts_say_what_became_of_every_row(tokenizer: Any) -> None:
    prepared = run(pairs(("a", "b"), ("c", None), ("d", ""), ("e", "f"), ("g", " ")), tokenizer)
    counts = prepared.counts
    assert (counts.rows, counts.used, counts.truncated) == (5, 2, 0)
    assert counts.dropped == {"NoAnswer": 3}
    assert counts.first_dropped == {"NoAnswer": (2, 3, 5)}
    assert counts.tokens == sum(len(row.ids) for row in prepared.rows)
    assert counts.supervised_tokens == 4  # b, f and two turn ends


def test_only_the_first_lines_of_dropped_rows_are_named(tokenizer: Any) -> None:
    counts = run(pairs(("a", "b"), *[("c", None)] * 50), tokenizer).counts
    assert counts.dropped == {"NoAnswer": 50}
    assert counts.first_dropped == {"NoAnswer": tuple(range(2, 12))}


LONG = ("again", "and again " * 5000)


def test_one_very_long_row_is_truncated_before_anything_is_batched(tokenizer: Any) -> None:
    prepared = run(pairs(*[("2+2?", "four")] * 99, LONG), tokenizer)
    assert [len(row.ids) for row in prepared.rows][-1] == 2048
    assert (prepared.counts.used, prepared.counts.truncated) == (100, 1)
    assert prepared.rows[-1].labels[-1] == IGNORED, "the token that was cut off is not predicted"


def test_one_very_long_row_is_skipped_and_counted(tokenizer: Any) -> None:
    counts = run(pairs(*[("2+2?", "four")] * 99, LONG), tokenizer, overlong=Overlong.SKIP).counts
    assert (counts.used, counts.dropped, counts.first_dropped) == (99, {"TooLong": 1}, {"TooLong": (100,)})


def test_one_very_long_row_fails_the_task_and_is_named(tokenizer: Any) -> None:
    error = failure(pairs(("2+2?", "four"), LONG), tokenizer, overlong=Overlong.FAIL)
    assert error.reason is FailureReason.ROW_TOO_LONG
    assert "dataset.inline, line 2 has " in str(error)
    assert "maxSeqLength is 2048" in str(error)


def test_a_row_whose_answer_is_cut_off_is_dropped_and_the_others_are_used(tokenizer: Any) -> None:
    counts = run(pairs(("a", "b"), ("long " * 50, "yes")), tokenizer, max_seq_length=32).counts
    assert (counts.used, counts.truncated, counts.dropped) == (1, 0, {"NoSupervisedTokens": 1})


def test_a_dataset_without_one_supervised_token_fails_at_once(tokenizer: Any) -> None:
    error = failure(pairs(*[("long " * 50, "yes")] * 4), tokenizer, max_seq_length=16)
    assert error.reason is FailureReason.NO_TRAINABLE_TOKENS
    assert "maxSeqLength cuts every answer off: raise it" in str(error)


@pytest.mark.parametrize(
    ("dataset", "told"),
    [
        (
            pairs(("a", None), ("b", "")),
            "none of the 2 rows of dataset.inline can be trained on: NoAnswer 2 (first in line 1)",
        ),
        (Dataset(inline='{"messages": []}', format=DatasetFormat.MESSAGES), "NoAnswer 1"),
        (Dataset(inline="\n\n"), "dataset.inline holds no rows"),
    ],
)
def test_a_dataset_without_one_answer_fails_at_once(tokenizer: Any, dataset: Dataset, told: str) -> None:
    error = failure(dataset, tokenizer)
    assert error.reason is FailureReason.NO_TRAINABLE_ROWS
    assert told in str(error)


def test_null_never_reaches_the_tokens_as_a_word(tokenizer: Any) -> None:
    line = '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": %s}]}'
    dataset = Dataset(
        inline="\n".join([line % '"ok"', line % "null", line % 'null, "tool_calls": [{}]']),
        format=DatasetFormat.MESSAGES,
    )
    prepared = run(dataset, tokenizer)
    assert prepared.counts.dropped == {"NoAnswer": 1, "ToolCalls": 1}
    assert [tokenizer.decode(row.ids) for row in prepared.rows] == [
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nok<|im_end|>\n"
    ]


def test_a_window_beyond_the_models_own_is_refused(tokenizer: Any) -> None:
    error = failure(pairs(("a", "b")), tokenizer, max_positions=1024)
    assert error.reason is FailureReason.INVALID_SPEC
    assert "maxSeqLength is 2048, but the base model takes 1024 tokens" in str(error)


def test_conversations_need_a_chat_template(make_tokenizer: Callable[..., Any]) -> None:
    bare = make_tokenizer(None, specials=["<eos>"], eos_token="<eos>")
    error = failure(Dataset(inline='{"messages": []}', format=DatasetFormat.MESSAGES), bare)
    assert error.reason is FailureReason.INVALID_SPEC
    assert "no chat template" in str(error)


def test_an_invalid_row_is_named_by_the_files_address(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a", "completion": "b"}\r\n\r\n{"prompt": "a"}\r\n')
    error = failure(Dataset(uri=path.as_uri()), tokenizer)
    assert error.reason is FailureReason.INVALID_ROW
    assert f"{path.as_uri()} has invalid rows: line 3: " in str(error)


def test_a_missing_file_is_an_error_of_the_store(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(StorageError) as caught:
        run(Dataset(uri=(tmp_path / "absent.jsonl").as_uri()), tokenizer)
    assert caught.value.reason is FailureReason.DATASET_NOT_FOUND


def test_rows_are_in_the_files_order_whatever_the_batches(tokenizer: Any) -> None:
    dataset = pairs(*[(f"{number}?", f"<{number}>" if number % 7 else None) for number in range(1200)])
    rows = run(dataset, tokenizer).rows
    answers = [tokenizer.decode(row.labels[row.labels != IGNORED]) for row in rows]
    assert answers == [f"<{number}><|im_end|>" for number in range(1200) if number % 7]
