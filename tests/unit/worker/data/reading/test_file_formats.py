"""Every kind of file, packed or not, gives the same rows; what is broken is named."""

from __future__ import annotations

import gzip
import itertools
import json
import random
import time
import zlib
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from mlora_worker.data.reading import compression
from mlora_worker.data.reading.compression import Undecodable, unpacked
from mlora_worker.data.reading.file_formats import format_of, records_of_file, records_of_text
from mlora_worker.data.reading.row_types import Record
from mlora_worker.protocol import FileFormat, StorageAccess
from mlora_worker.storage.object_store.store import open_store
from mlora_worker.storage.remote.dataset_source import DatasetSource, open_sources
from tests.fixtures.one_file import OneFile

SOURCE: DatasetSource = open_sources(open_store(StorageAccess(), allow_files=True), StorageAccess())
ROWS = [{"prompt": f"{number}?\u2028", "completion": f"é {number}"} for number in range(1000)]
COLUMNS = ("prompt", "completion")


def zstd(data: bytes) -> bytes:
    return bytes(pa.compress(data, "zstd", asbytes=True))


def json_lines() -> bytes:
    return "\n".join(json.dumps(row) for row in ROWS).encode()


def csv_file() -> bytes:
    return "\r\n".join(
        ["prompt,completion", *(f'"{row["prompt"]}",{row["completion"]}' for row in ROWS)]
    ).encode()


def parquet() -> bytes:
    out = pa.BufferOutputStream()
    table = pa.table({"unused": list(range(1000)), **{name: [row[name] for row in ROWS] for name in COLUMNS}})
    pa.parquet.write_table(table, out, row_group_size=300)
    return bytes(out.getvalue())


def array() -> bytes:
    return json.dumps(ROWS, indent=2).encode()


def rows_of(path: Path, given: FileFormat | None = None) -> list[Record]:
    return list(records_of_file(SOURCE, path.as_uri(), format_of(path.as_uri(), given), COLUMNS))


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("rows.jsonl", json_lines),
        ("rows", json_lines),
        ("lines.json", json_lines),
        ("rows.JSON", array),
        ("rows.csv", csv_file),
        ("rows.parquet", parquet),
    ],
)
@pytest.mark.parametrize(
    ("suffix", "pack"), [("", bytes), (".gz", gzip.compress), (".zst", zstd), (".zst", gzip.compress)]
)
def test_each_kind_of_file_gives_the_same_rows(
    tmp_path: Path, name: str, made: Callable[[], bytes], suffix: str, pack: Callable[[bytes], bytes]
) -> None:
    if name.endswith("parquet") and suffix:
        pytest.skip("Parquet packs its own pages")
    path = tmp_path / f"{name}{suffix}"
    path.write_bytes(pack(made()))
    assert [record.value for record in rows_of(path)] == ROWS


def test_the_spec_wins_over_the_name(tmp_path: Path) -> None:
    path = tmp_path / "rows.txt"
    path.write_bytes(csv_file())
    assert len(rows_of(path, FileFormat.CSV)) == 1000


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("s3://b/rows.jsonl.gz", FileFormat.JSONL),
        ("https://host/rows.csv?download=true", FileFormat.CSV),
        ("s3://b/what?.csv", FileFormat.CSV),
        ("s3://b/rows", FileFormat.JSONL),
        ("hf://datasets/a/b@c/train.Parquet", FileFormat.PARQUET),
    ],
)
def test_a_names_ending_tells_the_kind(name: str, expected: FileFormat) -> None:
    assert format_of(name, None) is expected


def damaged(data: bytes) -> bytes:
    return data[:60] + bytes(byte ^ 0xFF for byte in data[60:80]) + data[80:]


@pytest.mark.parametrize(
    ("name", "data", "told"),
    [
        ("rows.jsonl.gz", gzip.compress(json_lines())[:-20], "a truncated gzip file"),
        ("rows.jsonl.gz", damaged(gzip.compress(json_lines())), "a damaged gzip file"),
        ("rows.jsonl.zst", zstd(json_lines())[:-20], "a truncated zstd file"),
        ("rows.jsonl", b"\xfd7zXZ\x00\x00\x04", "is xz, which is not read"),
        ("rows.arrow", b"ARROW1\0\0 and so on", "is Arrow, which is not read"),
        ("rows.jsonl", b"PK\x03\x04 and so on", "is zip, which is not read"),
        ("rows.jsonl", parquet(), "needs dataset.fileFormat: parquet"),
        ("rows.parquet", json_lines(), "not a readable Parquet file"),
        ("rows.parquet", parquet()[:-50], "not a readable Parquet file"),
        ("rows.parquet", b"", "not a readable Parquet file"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_its_flaw(
    tmp_path: Path, name: str, data: bytes, told: str
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(Undecodable) as caught:
        rows_of(tmp_path / name)
    assert told in str(caught.value)


def test_members_of_a_gzip_file_follow_each_other_and_padding_is_no_data() -> None:
    packed = gzip.compress(b"one\n") + gzip.compress(b"two\n") + b"\0" * 512
    assert b"".join(unpacked([packed[:5], packed[5:40], packed[40:]])) == b"one\ntwo\n"


def test_what_was_packed_very_well_comes_out_in_small_parts() -> None:
    for pack in (gzip.compress, zstd):
        parts = [len(part) for part in unpacked([pack(b"\0" * 50_000_000)])]
        assert sum(parts) == 50_000_000
        assert max(parts) <= 4 * 2**20


def test_a_parquet_file_is_read_by_ranges_and_never_whole(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    noise = [random.Random(number).randbytes(300).hex() for number in range(10_000)]
    pa.parquet.write_table(
        pa.table({"prompt": noise, "completion": noise, "unused": noise}), path, row_group_size=500
    )
    watched = OneFile(path.read_bytes())
    rows = records_of_file(watched, "file:///rows.parquet", FileFormat.PARQUET, COLUMNS)
    next(rows)
    assert watched.read < path.stat().st_size / 4


def test_nested_columns_of_parquet_are_turns(tmp_path: Path) -> None:
    turns: list[Any] = [[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]]
    pa.parquet.write_table(pa.table({"messages": turns}), tmp_path / "rows.parquet")
    (row,) = records_of_file(
        SOURCE, (tmp_path / "rows.parquet").as_uri(), FileFormat.PARQUET, ("messages", "tools")
    )
    assert row == Record(1, {"messages": turns[0]})


def gzip_of_zeros() -> bytes:
    packer = zlib.compressobj(9, wbits=31)
    return b"".join(packer.compress(bytes(2**20)) for _ in range(128)) + packer.flush()


@pytest.mark.parametrize("packed", [gzip_of_zeros, lambda: zstd(bytes(2**27))], ids=["gzip", "zstd"])
def test_a_file_that_unpacks_to_very_much_more_than_it_has_is_given_up(packed: Callable[[], bytes]) -> None:
    made: list[int] = []
    with pytest.raises(Undecodable, match="unpacks to more than 400 times its size"):
        made.extend(map(len, unpacked([packed()])))
    assert sum(made) <= 80 * 2**20


@pytest.mark.parametrize(("pack", "rows"), [(gzip.compress, 10**5), (zstd, 10**6)], ids=["gzip", "zstd"])
def test_rows_that_repeat_themselves_are_unpacked(pack: Callable[[bytes], bytes], rows: int) -> None:
    """Whatever the ratio, which a file of few MiB is not judged by: of these with zstd it is thousands."""
    text = b"".join(b'{"prompt": "%d?", "completion": "yes"}\n' % (number % 1000) for number in range(rows))
    packed = pack(text)
    assert b"".join(unpacked([packed])) == text


def test_what_has_no_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "MOST_BYTES", 2**24)
    for pieces in (itertools.repeat(b"\n" * 2**20), itertools.repeat(gzip.compress(bytes(1000)) * 1000)):
        with pytest.raises(Undecodable, match=r"has more than 0\.015625 GiB: split it"):
            deque(unpacked(pieces), maxlen=0)


def test_small_pieces_are_gathered_and_many_packed_parts_take_linear_time() -> None:
    pieces = [len(piece) for piece in unpacked(b"x" * 1000 for _ in range(5000))]
    assert sum(pieces) == 5_000_000
    assert len(pieces) <= 5
    parts = gzip.compress(b"") * 100_000  # 2 MB that stand for nothing
    began = time.process_time()
    assert b"".join(unpacked([parts])) == b""
    assert time.process_time() - began < 20


def test_an_array_of_long_rows_that_trickles_in_takes_linear_time() -> None:
    row = json.dumps({"prompt": "x" * 20_000_000, "completion": "y"}).encode()
    text = b"[" + row + b"]"
    pieces = (text[at : at + 1000] for at in range(0, len(text), 1000))
    began = time.process_time()
    assert len(list(records_of_text(pieces, FileFormat.JSON))) == 1
    assert time.process_time() - began < 20
