"""Columns that dataset.fields names and no row has are refused: what they hold would be lost in silence."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from mlora_worker.data.errors import DataError
from mlora_worker.data.prepare import Prepared, prepare
from mlora_worker.data.training_rows.row_cache import RowCache
from mlora_worker.protocol import Dataset, FailureReason, StorageAccess, Training
from mlora_worker.storage.object_store.store import open_store
from mlora_worker.storage.remote.dataset_source import open_sources
from tests.fixtures.tiny_model import CHATML

SOURCE = open_sources(open_store(StorageAccess(), allow_files=True), StorageAccess())
ROW = {"instruction": "Add.", "input": "2 2", "output": "4", "unused": "x"}
TALK = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "systen": "c"}


@pytest.fixture(scope="module")
def tokenizer(make_tokenizer: Callable[..., Any]) -> Any:
    return make_tokenizer(CHATML, specials=["<|im_start|>", "<|im_end|>"], eos_token="<|im_end|>")


def run(
    tokenizer: Any, cache: RowCache | None = None, most_rows: int | None = None, **dataset: Any
) -> Prepared:
    rows = Dataset.model_validate({"format": "alpaca", **dataset})
    return prepare(rows, Training(), tokenizer, SOURCE, 512, cache=cache, most_rows=most_rows)


def lines(*rows: dict[str, Any]) -> str:
    return "\n".join(map(json.dumps, rows))


def written(folder: Path, kind: str, *rows: dict[str, Any]) -> str:
    path = folder / f"rows.{kind}"
    if kind == "parquet":
        out = io.BytesIO()
        pa.parquet.write_table(pa.Table.from_pylist(list(rows)), out)
        path.write_bytes(out.getvalue())
    elif kind == "csv":
        path.write_text("\n".join([",".join(rows[0]), *(",".join(row.values()) for row in rows)]))
    else:
        path.write_text(json.dumps(rows) if kind == "json" else lines(*rows))
    return path.as_uri()


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
def test_a_column_that_no_row_has_is_named_with_those_that_are_there(
    tokenizer: Any, tmp_path: Path, kind: str
) -> None:
    uri = written(tmp_path, kind, ROW, ROW)
    with pytest.raises(DataError) as caught:
        run(tokenizer, uri=uri, fields={"input": "imput"}, cache=RowCache(tmp_path / "cache", "n", 10**9))
    assert caught.value.reason is FailureReason.INVALID_SPEC
    told = str(caught.value)
    assert told.startswith(f"dataset.fields.input names the column 'imput', which no row of {uri} has; ")
    assert "'input', 'instruction', 'output', 'unused'; did you mean 'input'?" in told
    assert not list((tmp_path / "cache").rglob("ids.i4")), "nothing is kept of it"


def test_so_is_the_system_turn_of_sharegpt(tokenizer: Any) -> None:
    with pytest.raises(
        DataError, match=r"fields.system names the column 'sistem', .* did you mean 'systen'\?"
    ):
        run(tokenizer, inline=lines(TALK), format="sharegpt", fields={"system": "sistem"})


@pytest.mark.parametrize(
    ("rows", "fields"),
    [
        ([{**ROW, "context": "x"}], {"input": "context"}),
        ([ROW, {"instruction": "a", "output": "b", "context": None}], {"input": "context"}),
        ([{"instruction": "a", "output": "b"}], {}),
        ([ROW], {"input": "input"}),
    ],
)
def test_a_column_that_some_row_has_or_that_nobody_named_is_no_mistake(
    tokenizer: Any, rows: list[dict[str, Any]], fields: dict[str, str]
) -> None:
    assert len(run(tokenizer, inline=lines(*rows), fields=fields).rows) == len(rows)


def test_of_a_sample_nobody_knows(tokenizer: Any) -> None:
    rows = [{"instruction": "a", "output": "b"}] * 5
    assert len(run(tokenizer, inline=lines(*rows), fields={"input": "rare"}, most_rows=3).rows) == 3


def test_dropped_rows_of_several_files_are_named_with_their_file(tokenizer: Any, tmp_path: Path) -> None:
    empty = {**ROW, "output": ""}
    uris = []
    for name, rows in (("a", [ROW, empty]), ("b", [empty, ROW, empty])):
        (tmp_path / name).mkdir()
        uris.append(written(tmp_path / name, "jsonl", *rows))
    counts = run(tokenizer, uris=uris).counts
    assert counts.first_dropped == {"NoAnswer": (2, 1, 3)}
    assert counts.first_dropped_in == {"NoAnswer": (uris[0], uris[1], uris[1])}
    assert run(tokenizer, uri=uris[1]).counts.first_dropped_in is None


def test_where_all_rows_are_dropped_the_first_one_is_named_with_its_file(
    tokenizer: Any, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text("\n" + lines({**ROW, "output": ""}))
    with pytest.raises(
        DataError, match=r"NoAnswer 2 \(first in line 2 of file://.*/a\.jsonl\): the answers are empty"
    ):
        run(tokenizer, uri=f"{tmp_path.as_uri()}/*.jsonl")
