"""The reader believes manifests, and tells when one was wrong to believe."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable
from typing import Any

import pytest
from botocore.exceptions import ClientError

from bench.chaos_parts.reader import Reader

PREFIX = "chaos/one"
MANIFEST = f"{PREFIX}/manifest.json"


class Bucket:
    """As much of an S3 client as a reader needs. ``on_read`` is called before each read."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        self.on_read: Callable[[str], None] = lambda _: None

    def get_paginator(self, _: str) -> Bucket:
        return self

    def paginate(self, **_: str) -> list[dict[str, Any]]:
        entries = [
            {"Key": key, "ETag": hashlib.md5(body, usedforsecurity=False).hexdigest()}
            for key, body in self.held.items()
        ]
        return [{"Contents": entries}]

    def get_object(self, *, Key: str, **_: str) -> dict[str, Any]:
        self.on_read(Key)
        if Key not in self.held:
            raise ClientError({"Error": {"Code": "NoSuchKey"}}, "GetObject")
        return {"Body": io.BytesIO(self.held[Key])}

    def publish(self, weights: bytes, told: bytes) -> None:
        sha256 = hashlib.sha256(told).hexdigest()
        self.held[f"{PREFIX}/weights"] = weights
        self.held[MANIFEST] = json.dumps({"files": [{"name": "weights", "sha256": sha256}]}).encode()


@pytest.fixture
def bucket() -> Bucket:
    return Bucket()


def look_at(bucket: Bucket) -> Reader:
    reader = Reader(bucket, "adapters", every=60.0)
    reader.stop()
    return reader


def test_a_whole_adapter_is_seen_whole(bucket: Bucket) -> None:
    bucket.publish(b"weights", b"weights")
    bucket.held[f"{PREFIX}/checkpoints/step-5/manifest.json"] = b"not an adapter's"
    reader = look_at(bucket)
    assert (reader.whole, reader.half_written) == ({PREFIX}, [])


def test_files_without_a_manifest_are_no_adapter(bucket: Bucket) -> None:
    bucket.held[f"{PREFIX}/weights"] = b"weights"
    reader = look_at(bucket)
    assert (reader.whole, reader.half_written) == (set(), [])


def test_a_file_that_is_missing_or_different_is_told(bucket: Bucket) -> None:
    bucket.publish(b"half", b"whole")
    assert look_at(bucket).half_written == [f"{MANIFEST}: weights is not what the manifest says"]
    del bucket.held[f"{PREFIX}/weights"]
    assert look_at(bucket).half_written == [f"{MANIFEST}: weights is missing"]


def test_a_manifest_that_is_withdrawn_meanwhile_is_not_believed(bucket: Bucket) -> None:
    bucket.publish(b"half", b"whole")

    def withdraw(key: str) -> None:
        if key.endswith("weights"):
            bucket.held.pop(MANIFEST, None)

    bucket.on_read = withdraw
    assert look_at(bucket).half_written == []
