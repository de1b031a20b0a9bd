"""A data set whose task names no format is read in that of its first rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlora_worker.data.errors import DataError
from mlora_worker.data.prepare import prepare
from mlora_worker.data.reading.detection import with_format
from mlora_worker.data.task_rows import task_rows
from mlora_worker.protocol import (
    FIRST_ROWS,
    Dataset,
    DatasetFields,
    DatasetFormat,
    DatasetSpec,
    Evaluation,
    FailureReason,
    LoRAConfig,
    StorageAccess,
    TaskPlan,
    Training,
    TrainOn,
)
from mlora_worker.storage.object_store.store import open_store
from mlora_worker.storage.remote.dataset_source import DatasetSource, open_sources
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.tiny_model import CHATML, byte_level_tokenizer

PAIR, CHAT = (
    {"prompt": "2+2?", "completion": "4"},
    {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]},
)


@pytest.fixture
def tokenizer() -> Any:
    made = byte_level_tokenizer(vocabulary=300)
    made.chat_template = CHATML
    return made


def lines(*rows: object) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def unnamed(**settings: Any) -> Dataset:
    return DatasetSpec(**settings).for_plan()


def here(folder: Path | None = None) -> DatasetSource:
    store = open_store(StorageAccess(), allow_files=True) if folder is not None else MemoryStore()
    return open_sources(store, StorageAccess())


def refused(dataset: Dataset, *, own_template: bool = False) -> str:
    with pytest.raises(DataError) as caught:
        with_format(dataset, here(), None, own_template=own_template)
    assert caught.value.reason is FailureReason.INVALID_SPEC
    return str(caught.value)


def test_a_format_that_is_named_is_not_looked_for() -> None:
    named = DatasetSpec(inline=lines(CHAT), format=DatasetFormat.TEXT).for_plan()
    assert not named.detect_format
    assert with_format(named, here(), None) is named


def test_rows_are_trained_on_as_if_the_format_were_named(tokenizer: Any) -> None:
    for row, format in ((PAIR, DatasetFormat.PROMPT_COMPLETION), (CHAT, DatasetFormat.MESSAGES)):
        made = [
            prepare(dataset, Training(), tokenizer, here(), 1000)
            for dataset in (unnamed(inline=lines(row)), Dataset(inline=lines(row), format=format))
        ]
        assert [one.counts.format for one in made] == [format, format]
        assert made[0].counts == made[1].counts
        assert made[0].rows.digest() == made[1].rows.digest()


def test_every_kind_of_file_is_looked_into(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(lines(CHAT))
    (tmp_path / "a.json").write_text(json.dumps([CHAT, CHAT]))
    (tmp_path / "a.csv").write_text("instruction,input,output\na,,b\n")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").Table.from_pylist([CHAT | {"id": number} for number in range(50)])
    parquet.write_table(table, tmp_path / "a.parquet")
    found = {
        path.name: with_format(unnamed(uri=path.as_uri()), here(tmp_path), None).format
        for path in sorted(tmp_path.iterdir())
    }
    messages = DatasetFormat.MESSAGES
    assert found == {
        "a.csv": DatasetFormat.ALPACA,
        "a.json": messages,
        "a.jsonl": messages,
        "a.parquet": messages,
    }


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", lines(CHAT).encode("utf-16"), "UTF-16"),
        ("a.jsonl.gz", b"\x1f\x8b\x08\x00cut", "gzip"),
        ("a.parquet", b"no table", "Parquet"),
    ],
)
def test_a_file_that_is_something_else_is_named_as_where_the_format_is_given(
    tmp_path: Path, name: str, content: bytes, words: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=words) as caught:
        with_format(unnamed(uri=(tmp_path / name).as_uri()), here(tmp_path), None)
    assert caught.value.reason is FailureReason.INVALID_ROW


def test_only_the_first_rows_decide(tokenizer: Any) -> None:
    rows = [PAIR] * FIRST_ROWS
    dataset = unnamed(inline=lines(*rows, CHAT))
    assert with_format(dataset, here(), None).format is DatasetFormat.PROMPT_COMPLETION
    with pytest.raises(DataError, match=f"line {FIRST_ROWS + 1}: has no column 'prompt'"):
        prepare(dataset, Training(), tokenizer, here(), 1000)
    assert "All rows of a task need one format" in refused(unnamed(inline=lines(*rows[1:], CHAT)))


def test_the_first_rows_may_be_in_several_files(tmp_path: Path) -> None:
    names = ["a.jsonl", "b.jsonl"]
    for name, row in zip(names, (PAIR, CHAT), strict=True):
        (tmp_path / name).write_text(lines(row))
    dataset = unnamed(uris=tuple((tmp_path / name).as_uri() for name in names))
    with pytest.raises(DataError, match=r"row 1 has the keys .* and row 2 has the keys 'messages'"):
        with_format(dataset, here(tmp_path), None)


def test_a_refusal_names_the_source_and_what_to_write() -> None:
    said = refused(unnamed(inline=lines({"question": "a", "answer": "b"})))
    assert said.startswith("dataset.inline: the format of the rows cannot be detected: ")
    assert said.endswith("write format: promptCompletion with fields: {prompt: question, completion: answer}")
    fields = DatasetFields(prompt="question", completion="answer")
    named = unnamed(inline=lines({"question": "a", "answer": "b"}), fields=fields)
    assert with_format(named, here(), None).format is DatasetFormat.PROMPT_COMPLETION


def test_text_is_not_detected_beside_what_it_cannot_have() -> None:
    text = lines({"text": "a"})
    assert with_format(unnamed(inline=text), here(), None).format is DatasetFormat.TEXT
    everything = unnamed(inline=text, train_on=TrainOn.EVERYTHING)
    assert with_format(everything, here(), None).format is DatasetFormat.TEXT
    assert "neither trainOn nor a chat template" in refused(
        unnamed(inline=text, train_on=TrainOn.LAST_ANSWER)
    )
    assert "neither trainOn nor a chat template" in refused(unnamed(inline=text), own_template=True)


@pytest.mark.parametrize(
    ("text", "told"),
    [("\n", "contains no rows"), ("[1]\nno", "line 1: is a list, not an object"), ("{", "line 1: not JSON")],
)
def test_where_there_are_no_rows_reading_says_what_is_wrong(tokenizer: Any, text: str, told: str) -> None:
    with pytest.raises(DataError, match=told):
        prepare(unnamed(inline=text), Training(), tokenizer, here(), 1000)


def test_a_row_that_is_none_does_not_decide(tokenizer: Any) -> None:
    with pytest.raises(DataError, match="line 1: not JSON"):
        prepare(unnamed(inline="{\n" + lines(CHAT)), Training(), tokenizer, here(), 1000)


def test_rows_of_an_evaluation_have_the_format_of_those_that_are_trained_on(
    tokenizer: Any, tmp_path: Path
) -> None:
    (tmp_path / "eval.jsonl").write_text(lines(CHAT | PAIR))  # by themselves, they may be either
    task = TaskPlan(
        uid="a", namespace="n", name="a", base_model="m", lora=LoRAConfig(rank=2),
        dataset=unnamed(inline=lines(CHAT)), training=Training(), output_uri="s3://b/p",
        evaluation=Evaluation(uri=(tmp_path / "eval.jsonl").as_uri()),
    )  # fmt: skip
    made = task_rows(task, tokenizer, here(tmp_path), 1000)
    assert made.counts.format is DatasetFormat.MESSAGES
    assert made.evaluation is not None
    assert made.evaluation.digest() == made.train.digest()
