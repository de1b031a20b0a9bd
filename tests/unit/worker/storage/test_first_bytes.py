"""Files that lie in the place of others are named by their first bytes, as rows and as a model."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import pickle
import tarfile
import zipfile
from pathlib import Path

import pytest

from mlora_worker.data.reading.compression import Undecodable
from mlora_worker.data.reading.file_formats import records_of_file, records_of_text
from mlora_worker.protocol import FileFormat, ModelSource
from mlora_worker.storage.base_model.model_source import ModelFiles
from mlora_worker.storage.base_model.safetensors_reader import BrokenModel, read_header
from mlora_worker.storage.first_bytes import named, stands_in
from mlora_worker.storage.object_store.file_store import FileStore
from tests.fixtures.one_file import OneFile

POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)
PAGE = b"\n  <!DOCTYPE html>\n<html><head><title>Log in</title></head></html>"
ROW = '{"prompt": "a?", "completion": "b"}\n'


def zipped(name: str) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        file.writestr(name, "x")
    return out.getvalue()


def tarred() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as file:
        entry = tarfile.TarInfo("rows.jsonl")
        entry.size = len(ROW)
        file.addfile(entry, io.BytesIO(ROW.encode()))
    return out.getvalue()


WRONG = [
    (POINTER, "is a pointer of Git LFS .*git lfs pull"),
    (b"../.git/annex/objects/aa/bb/SHA256E-s1--x.jsonl", "is a pointer of git-annex .*git annex get"),
    (PAGE, "is a web page .*/resolve/"),
    (b'<?xml version="1.0"?><html xmlns="x"></html>', "is a web page"),
    (b'<?xml version="1.0"?><Error><Code>NoSuchKey</Code></Error>', "is XML, perhaps a store's"),
    (ROW.encode("utf-16"), "is text in UTF-16.*iconv -f UTF-16 -t UTF-8"),
    (ROW.encode("utf-16-le"), "is text in UTF-16"),
    (ROW.encode("utf-16-be"), "is text in UTF-16"),
    (ROW.encode("utf-32"), "is text in UTF-32"),
    (zipped("rows.jsonl"), "is zip, which is not read: unpack it"),
    (zipped("[Content_Types].xml"), r"is an Excel workbook .*save it as CSV"),
    (zipped("xl/workbook.xml"), r"is an Excel workbook"),
    (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1 and so on", "Microsoft Office"),
    (bz2.compress(ROW.encode()), "is bzip2"),
    (lzma.compress(ROW.encode()), "is xz"),
    (tarred(), "is a tar archive"),
    (pickle.dumps({"prompt": "a"}), "is a pickle"),
    (b"PAR1\x15\x04\x15", "is Parquet, which needs dataset.fileFormat: parquet"),
    (b"PARE\x00\x00", "is an encrypted Parquet file"),
    (b"ARROW1\x00\x00", "is Arrow"),
    (b"%PDF-1.7", "is PDF"),
]


@pytest.mark.parametrize(
    ("data", "told"), WRONG, ids=lambda value: value[:24] if isinstance(value, str) else None
)
@pytest.mark.parametrize("kind", [FileFormat.JSONL, FileFormat.JSON, FileFormat.CSV])
def test_what_is_no_file_of_rows_is_named(data: bytes, told: str, kind: FileFormat) -> None:
    with pytest.raises(Undecodable, match=told):
        list(records_of_text([data], kind))


@pytest.mark.parametrize(
    "data",
    [PAGE, tarred(), zipped("rows.jsonl"), gzip.compress(b"x", mtime=0), ROW.encode("utf-16")],
    ids=["page", "tar", "zip", "gzip", "utf-16"],
)
def test_what_is_packed_is_looked_at_too(data: bytes) -> None:
    with pytest.raises(Undecodable, match="holds, packed, what is"):
        list(records_of_text([gzip.compress(data)], FileFormat.JSONL))


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (POINTER, "is not a readable Parquet file; it is a pointer of Git LFS"),
        (PAGE, "is not a readable Parquet file; it is a web page"),
        (
            ROW.encode(),
            "is not a readable Parquet file; it does not begin as one: set dataset.fileFormat",
        ),
        (gzip.compress(ROW.encode(), mtime=0), "is not a readable Parquet file; it is gzip"),
    ],
    ids=["pointer", "page", "rows", "gzip"],
)
def test_what_is_no_parquet_file_is_named(data: bytes, told: str) -> None:
    with pytest.raises(Undecodable, match=told):
        list(records_of_file(OneFile(data), "s3://b/rows.parquet", FileFormat.PARQUET, ("prompt",)))


@pytest.mark.parametrize(
    "text",
    [
        ROW, "PAR1,b\n1,2\n", "BZhang,b\n1,2\n", "ORCID,b\n1,2\n", "version,b\n1,2\n", "Object,b\n", "\ufeff" + ROW,
        "", "a", "GGUF,b\n1,2\n", "PARENT,b\n1,2\n", "€,b\n", '[{"a": 1}]', "PK,b\n1,2\n", "\n\n" + ROW,
    ],
)  # fmt: skip
def test_text_is_never_taken_for_something_else(text: str) -> None:
    assert named(text.encode()) is None
    assert stands_in(text.encode()) is None


CONFIG = json.dumps({"model_type": "llama"}).encode()


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer.model"])
@pytest.mark.parametrize(("data", "told"), [(POINTER, "is a pointer of Git LFS"), (PAGE, "is a web page")])
@pytest.mark.parametrize("local", [True, False])
def test_a_models_file_that_is_another_one_is_named(
    tmp_path: Path, name: str, data: bytes, told: str, local: bool
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for each in ("config.json", "tokenizer.json", "tokenizer.model"):
        (folder / each).write_bytes(data if each == name else CONFIG)
    uri = folder.as_uri()

    class Elsewhere(FileStore):
        """The same files under an address of a store."""

        def list(self, prefix: str, most: int) -> list[str]:
            del prefix
            return [one.replace(uri, "s3://b/m") for one in super().list(uri, most)]

        def read(self, at: str, most: int) -> bytes:
            return super().read(at.replace("s3://b/m", uri), most)

        def size(self, at: str) -> int:
            return super().size(at.replace("s3://b/m", uri))

        def origin(self, at: str) -> str:
            del at
            return ""

    store, at = (FileStore(), uri) if local else (Elsewhere(), "s3://b/m")
    model = ModelFiles(store, ModelSource(name="m", uri=at), tmp_path / "cache")
    with pytest.raises(BrokenModel, match=f"{name} {told}"):
        model.folder()


def test_weights_that_are_another_file_are_named() -> None:
    for data, told in (
        (POINTER, "pointer of Git LFS"),
        (PAGE, "web page"),
        (zipped("x"), "zip"),
        (b"<html>", "page"),
    ):
        with pytest.raises(BrokenModel, match=f"model.safetensors is .*{told}"):
            read_header(OneFile(data), "s3://b/m/model.safetensors")
