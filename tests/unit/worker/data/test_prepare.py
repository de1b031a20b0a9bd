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
from mlora_worker.data.training_rows.row_cache import RowCache
from mlora_worker.protocol import (
    ConfigMapReference,
    Dataset,
    DatasetFormat,
    FailureReason,
    Overlong,
    StorageAccess,
    Training,
)
from mlora_worker.storage.errors import StorageError
from mlora_worker.storage.object_store.store import open_store
from mlora_worker.storage.remote.dataset_source import open_sources

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
    assert "maxSeqLength cuts off every answer: raise it" in str(error)


@pytest.mark.parametrize(
    ("dataset", "told"),
    [
        (
            pairs(("a", None), ("b", "")),
            "none of the 2 rows of dataset.inline can be trained on: NoAnswer 2 (first in line 1)",
        ),
        (Dataset(inline='{"messages": []}', format=DatasetFormat.MESSAGES), "NoAnswer 1"),
        (Dataset(inline="\n\n"), "dataset.inline contains no rows"),
    ],
)
def test_a_dataset_without_one_answer_fails_at_once(tokenizer: Any, dataset: Dataset, told: str) -> None:
    error = failure(dataset, tokenizer)
    assert error.reason is FailureReason.NO_TRAINABLE_ROWS
    assert told in str(error)


def test_null_never_reaches_the_tokens_as_a_word(tokenizer: Any) -> None:
    line = '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": %s}]}'
    dataset = Dataset(
        inline="\n".join([line % '"ok"', line % "null", line % 'null, "tool_calls": [{"name": "f"}]']),
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
    assert "maxSeqLength is 2048, but the base model supports at most 1024 tokens" in str(error)


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


def many(count: int, **changes: Any) -> Dataset:
    rows = "\n".join(
        json.dumps({"prompt": f"{number}?", "completion": f"{number}"}) for number in range(count)
    )
    return Dataset(inline=rows, **changes)


def answers(rows: Any, tokenizer: Any) -> list[int]:
    return [
        int(tokenizer.decode(row.labels[row.labels != IGNORED]).removesuffix("<|im_end|>")) for row in rows
    ]


def test_the_first_rows_are_taken_and_no_more_are_read(tokenizer: Any) -> None:
    prepared = run(many(40, limit=3), tokenizer)
    assert answers(prepared.rows, tokenizer) == [0, 1, 2]
    assert (prepared.counts.rows, prepared.counts.used, prepared.counts.beyond_limit) == (3, 3, 0)


def test_a_sample_is_drawn_of_all_rows_and_is_the_same_each_time(tokenizer: Any) -> None:
    drawn = [
        answers(run(many(40, limit=10, shuffle_seed=seed), tokenizer).rows, tokenizer) for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] == sorted(set(drawn[0]))
    assert drawn[0] not in (drawn[2], list(range(10)))
    counts = run(many(40, limit=10, shuffle_seed=1), tokenizer).counts
    assert (counts.rows, counts.used, counts.beyond_limit) == (40, 10, 30)


def test_what_is_held_out_is_trained_on_by_nobody(tokenizer: Any) -> None:
    prepared = run(many(40, held_out=0.25), tokenizer, seed=3)
    train, apart = answers(prepared.rows, tokenizer), answers(prepared.held_out, tokenizer)
    assert sorted(train + apart) == list(range(40))
    assert (len(apart), prepared.counts.held_out, prepared.counts.used) == (10, 10, 30)
    assert prepared.counts.tokens == sum(len(row.ids) for row in prepared.rows)
    assert apart == answers(run(many(40, held_out=0.25), tokenizer, seed=3).held_out, tokenizer)
    assert apart != answers(run(many(40, held_out=0.25), tokenizer, seed=4).held_out, tokenizer)


def test_one_row_cannot_be_held_out_and_trained_on(tokenizer: Any) -> None:
    error = failure(many(1, held_out=0.5), tokenizer)
    assert error.reason is FailureReason.NO_TRAINABLE_ROWS
    assert "dataset.heldOut removes all of them" in str(error)


def test_the_end_of_a_long_row_is_kept_behind_its_first_token(make_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_tokenizer(
        "{{ bos_token }}" + CHATML,
        specials=["<bos>", "<|im_start|>", "<|im_end|>"],
        bos_token="<bos>",
        eos_token="<|im_end|>",
    )
    (row,) = run(pairs(LONG), tokenizer, max_seq_length=20, overlong=Overlong.TRUNCATE_LEFT).rows
    assert len(row.ids) == 20
    assert tokenizer.decode(row.ids[:1]) == "<bos>"
    assert tokenizer.decode(row.ids).endswith("and again <|im_end|>\n")
    assert row.labels[0] == IGNORED, "nobody has seen what stood before the second token"
    assert tokenizer.decode(row.labels[row.labels != IGNORED]).endswith("again <|im_end|>")


def test_files_are_read_one_after_the_other_and_a_flaw_names_its_own(tokenizer: Any, tmp_path: Path) -> None:
    for name, text in (("a.csv", "prompt,completion\n1?,1\n"), ("b.csv", "prompt,completion\n2?,2\n")):
        (tmp_path / name).write_text(text)
    both = Dataset(uri=f"{tmp_path.as_uri()}/*.csv")
    assert answers(run(both, tokenizer).rows, tokenizer) == [1, 2]
    assert answers(run(Dataset(uri=f"{tmp_path.as_uri()}/*.csv", split="b"), tokenizer).rows, tokenizer) == [
        2
    ]
    (tmp_path / "c.csv").write_text("prompt,completion\n3?,3\n4?\n")
    listed = Dataset(uris=tuple((tmp_path / name).as_uri() for name in ("b.csv", "a.csv")))
    assert answers(run(listed, tokenizer).rows, tokenizer) == [2, 1]
    assert f"{(tmp_path / 'c.csv').as_uri()} has invalid rows: line 3: has 1 values" in str(
        failure(both, tokenizer)
    )


def test_rows_of_a_config_map_come_as_text_and_its_key_tells_their_kind(tokenizer: Any) -> None:
    dataset = Dataset(config_map_ref=ConfigMapReference(name="rows", key="train.csv"))
    text = "prompt,completion\n1?,1\n"
    prepared = prepare(dataset, Training(), tokenizer, SOURCE, 1000, text=text)
    assert answers(prepared.rows, tokenizer) == [1]
    with pytest.raises(DataError, match=r"ConfigMap rows, key train\.csv has invalid rows: line 3"):
        prepare(dataset, Training(), tokenizer, SOURCE, 1000, text=text + "2\n")


def test_rows_that_lie_elsewhere_are_not_those_of_the_config_map(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("prompt,completion\n2?,2\n")
    elsewhere = (
        Dataset(uri=(tmp_path / "rows.csv").as_uri()),
        Dataset(inline='{"prompt": "2?", "completion": "2"}'),
    )
    for dataset in elsewhere:
        prepared = prepare(dataset, Training(), tokenizer, SOURCE, 1000, text="prompt,completion\n1?,1\n")
        assert answers(prepared.rows, tokenizer) == [2]


def test_texts_are_learnt_whole(tokenizer: Any) -> None:
    prepared = run(
        Dataset(inline='{"text": "It is four."}\n{"text": " "}', format=DatasetFormat.TEXT), tokenizer
    )
    assert tokenizer.decode(prepared.rows[0].ids) == "It is four.<|im_end|>"
    assert prepared.counts.dropped == {"EmptyText": 1}


def test_a_token_that_the_models_embedding_has_no_row_for_is_named_with_its_line(tokenizer: Any) -> None:
    """A pad token that was added later, for instance: a device would answer with an error that ends everybody."""
    dataset = pairs(("a", "b"), ("c", "d"))
    rows = prepare(dataset, Training(), tokenizer, SOURCE, 1000).rows
    last = max(int(row.ids.max()) for row in rows)
    assert len(prepare(dataset, Training(), tokenizer, SOURCE, 1000, vocabulary=last + 1).rows) == 2
    with pytest.raises(DataError) as refused:
        prepare(dataset, Training(), tokenizer, SOURCE, 1000, vocabulary=last)
    assert refused.value.reason is FailureReason.INVALID_ROW
    token = tokenizer.convert_ids_to_tokens(last)
    assert f"line 1 has the token {token!r} with number {last}" in str(refused.value)
    assert f"embedding has {last} rows" in str(refused.value)


def test_rows_that_are_kept_for_a_larger_vocabulary_are_not_taken_for_a_smaller_one(
    tokenizer: Any, tmp_path: Path
) -> None:
    cache, dataset = RowCache(tmp_path, "team-a"), pairs(("a", "b"))
    kept = prepare(dataset, Training(), tokenizer, SOURCE, 1000, cache=cache, vocabulary=10**6).rows
    last = max(int(row.ids.max()) for row in kept)
    with pytest.raises(DataError, match="has the token"):
        prepare(dataset, Training(), tokenizer, SOURCE, 1000, cache=cache, vocabulary=last)
