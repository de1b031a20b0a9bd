from __future__ import annotations

from pathlib import Path

import pytest

from mlora_worker.protocol import FailureReason
from mlora_worker.storage.errors import StorageError
from mlora_worker.storage.uri import (
    S3Address,
    file_path,
    file_uri,
    join,
    name_below,
    normal_endpoint,
    s3_address,
    scheme,
)


@pytest.mark.parametrize(
    ("uri", "bucket", "key"),
    [
        ("s3://data/gsm8k/train.jsonl", "data", "gsm8k/train.jsonl"),
        ("s3://data/a b/100%?x#y", "data", "a b/100%?x#y"),
        ("s3://data", "data", ""),
        ("s3://data/", "data", ""),
    ],
)
def test_s3_keys_are_taken_literally(uri: str, bucket: str, key: str) -> None:
    assert s3_address(uri) == S3Address(bucket, key)


@pytest.mark.parametrize("uri", ["file:///a/b c#1", "file:///a/b%20c%231"])
def test_file_paths_may_be_written_plainly_or_encoded(uri: str) -> None:
    assert file_path(uri) == Path("/a/b c#1")


@pytest.mark.parametrize("uri", ["file://a/b", "file:a/b", "file:///a?b=c", "file://localhost/a"])
def test_a_file_uri_that_is_no_absolute_path_is_refused(uri: str) -> None:
    with pytest.raises(StorageError, match="three slashes") as caught:
        file_path(uri)
    assert caught.value.reason is FailureReason.INVALID_SPEC


@pytest.mark.parametrize("uri", ["/a/b", "s3:/a", "http://a/b", "gs://a/b", ""])
def test_other_addresses_are_refused(uri: str) -> None:
    with pytest.raises(StorageError, match="not the address of a store"):
        scheme(uri)


def test_an_s3_uri_without_a_bucket_is_refused() -> None:
    with pytest.raises(StorageError, match="write s3://bucket/key"):
        s3_address("s3:///key")


@pytest.mark.parametrize("folder", ["s3://b/f", "s3://b/f/", "file:///b/f f", "file:///b/f%20f/"])
def test_a_name_that_was_joined_is_found_again(folder: str) -> None:
    assert name_below(folder, join(folder, "config.json")) == "config.json"
    assert name_below(folder, join(folder, "sub/x.json")) == "sub/x.json"


def test_a_path_survives_the_way_through_an_address() -> None:
    path = Path("/tmp/a b/ü#%41")
    assert file_path(file_uri(path)) == path


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("http://store:8333", "http://Store:8333/"),
        ("https://store", "https://store:443/"),
        ("http://store:80/s3", "http://store/s3/"),
        ("http://[::1]:9000", "http://[::1]:9000/"),
    ],
)
def test_spellings_of_one_endpoint_are_the_same(one: str, other: str) -> None:
    assert normal_endpoint(one) == normal_endpoint(other)


def test_other_endpoints_stay_others_and_nonsense_stays_what_it_is() -> None:
    others = [
        "http://store:8333", "https://store:8333", "http://store:8334", "http://store", "http://shop:8333", "http://store/S3",
        "http://store/s3", "http://[::1", "http://store:port", "store:8333", "",
    ]  # fmt: skip
    assert len({normal_endpoint(endpoint) for endpoint in others}) == len(others)
