"""How an S3 store is reached: what boto3 is told."""

from __future__ import annotations

import io
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from mlora_operator.download import Access, AdapterCorrupt, StoreRefused, open_source
from mlora_operator.download.source import PIECE


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "AWS_ENDPOINT_URL",
        "AWS_ENDPOINT_URL_S3",
        "AWS_REGION",
        "AWS_DEFAULT_REGION",
        "AWS_CA_BUNDLE",
        "REQUESTS_CA_BUNDLE",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")


def client(access: Access) -> Any:
    source: Any = open_source("s3://bucket/a/b/", access)
    return source._client


def url(access: Access) -> str:
    """Where an object would be asked for."""
    signed: str = client(access).generate_presigned_url("get_object", {"Bucket": "bucket", "Key": "a"})
    return signed.split("?")[0]


KEYS = {"access_key": "k", "secret_key": "s"}


@pytest.mark.parametrize(
    ("access", "expected"),
    [
        (Access(**KEYS), "https://bucket.s3.amazonaws.com/a"),
        (Access("http://store:8333", **KEYS), "http://store:8333/bucket/a"),
        (Access("http://store:8333", addressing="virtual", **KEYS), "http://bucket.store:8333/a"),
        (Access(addressing="path", **KEYS), "https://s3.amazonaws.com/bucket/a"),
    ],
)
def test_the_bucket_stands_where_the_store_looks_for_it(access: Access, expected: str) -> None:
    assert url(access) == expected


def test_the_environment_is_read_as_the_aws_tools_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://general:1")
    assert url(Access(**KEYS)) == "http://general:1/bucket/a"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://of-s3:1")
    assert url(Access(**KEYS)) == "http://of-s3:1/bucket/a"
    assert url(Access("http://said:1", **KEYS)) == "http://said:1/bucket/a"
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-central-1")
    assert client(Access(**KEYS)).meta.region_name == "eu-central-1"
    assert client(Access(region="eu-west-1", **KEYS)).meta.region_name == "eu-west-1"


def test_a_stores_own_certificates_are_given_as_a_file() -> None:
    verify = client(Access("https://store", ca_certificate="PEM", **KEYS))._endpoint.http_session._verify
    assert Path(verify).read_text() == "PEM"
    assert client(Access("https://store", **KEYS))._endpoint.http_session._verify is True


def test_of_a_store_that_knows_no_ranges_what_is_there_already_is_passed_over_in_pieces() -> None:
    whole, sizes = io.BytesIO(b"x" * (3 * PIECE + 5) + b"rest"), list[int]()

    class Body:
        def read(self, size: int) -> bytes:
            sizes.append(size)
            return whole.read(size)

        def iter_chunks(self, size: int) -> Any:
            yield whole.read(size)

    class Client:
        def get_object(self, **_: Any) -> Any:
            return {"Body": Body(), "ResponseMetadata": {"HTTPStatusCode": 200}}

    source: Any = open_source("s3://bucket/a", Access(**KEYS))
    source._client = Client()
    assert b"".join(source.read("weights", 3 * PIECE + 5)) == b"rest"
    assert max(sizes) == PIECE


def test_a_folder_may_have_any_name(tmp_path: Path) -> None:
    for name in ("a#b", "a?b", "a b", "ü"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "file").write_bytes(b"x")
        assert b"".join(open_source(folder.as_uri(), Access()).read("file")) == b"x"
    assert b"".join(open_source(f"file://{tmp_path}/a#b", Access()).read("file")) == b"x"
    for other in ("file://host/a", f"file://{tmp_path}/a?b", "file://[x/a", "s3://", "relative"):
        with pytest.raises(ValueError, match="not the address of an adapter"):
            open_source(other, Access())


@pytest.mark.parametrize("what", ["pipe", "socket", "folder", "link", "dangling link"])
def test_what_is_no_file_is_said_at_once_and_not_read(tmp_path: Path, what: str) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    store, path = tmp_path / "s", tmp_path / "s" / "README.md"
    store.mkdir()
    if what == "pipe":
        os.mkfifo(path)
    elif what == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(path))
    elif what == "folder":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / ("secret" if what == "link" else "nowhere"))
    with pytest.raises(AdapterCorrupt, match=r"README\.md is not a regular file"):
        b"".join(open_source(store.as_uri(), Access()).read("README.md"))


def test_a_folder_that_is_given_may_be_a_link_and_one_below_it_may_not(tmp_path: Path) -> None:
    (tmp_path / "store" / "bot").mkdir(parents=True)
    (tmp_path / "store" / "bot" / "file").write_bytes(b"x")
    (tmp_path / "store" / "linked").symlink_to("bot")
    (tmp_path / "mount").symlink_to("store")
    mount = open_source((tmp_path / "mount").as_uri(), Access())
    assert b"".join(mount.below("bot").read("file")) == b"x"
    assert b"".join(open_source((tmp_path / "mount" / "linked").as_uri(), Access()).read("file")) == b"x"
    with pytest.raises(AdapterCorrupt, match="linked is a symbolic link"):
        b"".join(mount.below("linked").read("file"))


def test_a_folder_that_becomes_a_link_while_it_is_looked_at_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "of-another").mkdir()
    (tmp_path / "of-another" / "file").write_bytes(b"x")
    (tmp_path / "store" / "bot").symlink_to(tmp_path / "of-another")
    monkeypatch.setattr(Path, "is_symlink", lambda _: False)  # as it was a moment ago
    with pytest.raises(StoreRefused, match="bot/file"):
        b"".join(open_source((tmp_path / "store").as_uri(), Access()).below("bot").read("file"))
