from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import SecretStr

from mlora_worker.commands.stdio import users_store
from mlora_worker.protocol import FailureReason, StorageAccess
from mlora_worker.storage.errors import AccessRefused, StorageError
from mlora_worker.storage.object_store.s3 import Keys
from mlora_worker.storage.object_store.store import open_store, open_store_from_files, read_keys

MOST = 2**20  # bytes


def keys_folder(folder: Path, **files: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(content)
    return folder


def test_local_files_are_refused_where_a_cluster_could_not_see_them(tmp_path: Path) -> None:
    uri = (tmp_path / "x").as_uri()
    with pytest.raises(StorageError, match="use an s3:// address") as caught:
        open_store(StorageAccess(), allow_files=False).read(uri, MOST)
    assert caught.value.reason is FailureReason.INVALID_SPEC
    store = open_store(StorageAccess(), allow_files=True)
    store.write(uri, b"here")
    assert store.read(uri, MOST) == b"here"


def test_half_a_pair_of_keys_is_refused_by_name() -> None:
    access = StorageAccess(access_key=SecretStr("AKID"), secret_key=SecretStr(" \n"))
    with pytest.raises(AccessRefused, match="the secret key is missing or empty") as caught:
        open_store(access, allow_files=False)
    assert caught.value.reason is FailureReason.ACCESS_DENIED


def test_keys_from_files_lose_the_newline_that_base64_of_echo_brings(tmp_path: Path) -> None:
    folder = keys_folder(tmp_path, AWS_ACCESS_KEY_ID="AKID\n", AWS_SECRET_ACCESS_KEY=" secret\r\n")
    assert read_keys(folder) == Keys("AKID", "secret")


def test_a_missing_key_file_is_named(tmp_path: Path) -> None:
    folder = keys_folder(tmp_path, AWS_ACCESS_KEY_ID="AKID")
    store = open_store_from_files("http://127.0.0.1:9", "us-east-1", folder, allow_files=False)
    with pytest.raises(AccessRefused, match=r"AWS_SECRET_ACCESS_KEY is missing or empty"):
        store.read("s3://bucket/key", MOST)


def test_keys_are_never_printed() -> None:
    assert "secret" not in repr(Keys("AKID", "secret", "session"))
    assert "AKID" not in repr(Keys("AKID", "secret", "session"))


def test_a_store_says_which_one_it_is_however_its_endpoint_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def origin(endpoint: str | None, uri: str = "s3://bucket/key") -> str:
        return open_store(StorageAccess(endpoint=endpoint), allow_files=True).origin(uri)

    assert origin("http://Store:80/") == origin("http://store") == "http://store"
    assert origin("http://store:81") != origin("http://store")
    assert origin(None) == "https://s3.amazonaws.com"
    assert origin("http://store", tmp_path.as_uri()) == ""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://store")  # the SDK reads it
    assert origin(None) == "http://store"


def test_an_endpoint_of_the_environment_is_held_to_the_same_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1\\@store")
    with pytest.raises(StorageError, match=r"storage endpoint .* since it has a backslash") as caught:
        users_store(StorageAccess()).origin("s3://bucket/key")
    assert caught.value.reason is FailureReason.INVALID_SPEC
