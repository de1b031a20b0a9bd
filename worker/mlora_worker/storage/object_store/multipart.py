"""A large file uploaded part by part, in next to no memory, and taken up where a former try ended.

An upload that broke off for a passing reason (no connection, a full store's 503, keys that have expired) stays on the
store, invisible to readers. The next try lists its parts and sends those alone that are not there or are not the same. A
part is the same when its size is, and its tag is the MD5 of what would be sent; stores whose tags are no digests get every
part again. Any other failure aborts the upload.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from botocore.exceptions import BotoCoreError, ClientError, ConnectionError, HTTPClientError

from mlora_worker.storage.object_store.s3_errors import code_of, is_missing, is_passing, status_of
from mlora_worker.storage.object_store.slices import FileSlice

_PIECE = 2**20
PART = 16 * 2**20  # bytes of one part; S3 wants at least 5 MiB
MOST_PARTS = 10_000  # S3's limit
_MOST_PAGES = (
    20  # of a list, each with up to a thousand entries: a store that knows no end of it is asked no further
)
_CHECKSUMS: Final = tuple(f"Checksum{kind}" for kind in ("CRC32", "CRC32C", "CRC64NVME", "SHA1", "SHA256"))
_MOST_ABORTED = 100  # older uploads at once

_KEYS = {401, 403}  # that have expired, or lack a right: new ones may come


def part_size(size: int, part: int) -> int:
    """Bytes of each part of a file of ``size`` bytes: ``part``, or more where that would be too many."""
    return max(part, -(-size // MOST_PARTS))


def upload_in_parts(
    client: Any,
    where: dict[str, str],
    path: Path,
    part: int,
    size: int,
    options: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """``where``: Bucket and Key. ``options``: what is said when an upload begins.

    Raises what the client raises, OSError when the file cannot be read."""
    former = _former_upload(client, where)
    try:
        _upload(client, where, former, path, part, size, options)
    except ClientError as error:
        if former is None or code_of(error) != "NoSuchUpload":
            raise
        _upload(
            client, where, None, path, part, size, options
        )  # somebody, or the store's own rule, has removed it meanwhile


def _upload(
    client: Any,
    where: dict[str, str],
    former: str | None,
    path: Path,
    part: int,
    size: int,
    options: Mapping[str, str],
) -> None:
    present = _parts_of(client, {**where, "UploadId": former}) if former is not None else {}
    sums = (
        {"ChecksumAlgorithm": "CRC32"} if _sends_checksums(client) else {}
    )  # those that the SDK gives each part
    begun = former or client.create_multipart_upload(**where, **options, **sums)["UploadId"]
    upload = {**where, "UploadId": begun}
    try:
        tags: list[dict[str, Any]] = []
        for number, start in enumerate(range(0, size, part), start=1):
            with FileSlice(path, start, min(part, size - start)) as data:
                known = _same(present.get(number), data)
                if known is None:
                    known = _tags(client.upload_part(**upload, PartNumber=number, Body=data))
            tags.append({"PartNumber": number, **known})
        _complete(client, upload, tags, size)
    except Exception as error:
        if not _is_passing(error):
            with contextlib.suppress(ClientError, BotoCoreError):
                client.abort_multipart_upload(**upload)
        raise


def _sends_checksums(client: Any) -> bool:
    return bool(client.meta.config.request_checksum_calculation == "when_supported")


def _is_passing(error: Exception) -> bool:
    if isinstance(error, ClientError):
        return status_of(error) in _KEYS or is_passing(error)
    return isinstance(error, ConnectionError | HTTPClientError)


def _tags(part: Mapping[str, Any]) -> dict[str, str]:
    """What a store says of a part. It is handed back as it comes: its tag is a digest on some stores only, and one that
    asked for a checksum wants that of each part at the end, too."""
    return {
        name: value
        for name, value in part.items()
        if name in ("ETag", *_CHECKSUMS) and isinstance(value, str)
    }


def _same(present: Mapping[str, Any] | None, data: FileSlice) -> dict[str, str] | None:
    """The tags of a part that the store has already, if it holds ``data``."""
    if present is None or present["Size"] != len(data):
        return None
    sum_ = hashlib.md5(usedforsecurity=False)
    while piece := data.read(_PIECE):
        sum_.update(piece)
    data.seek(0)
    return _tags(present) if present["ETag"].strip('"').lower() == sum_.hexdigest() else None


def _former_upload(client: Any, where: dict[str, str]) -> str | None:
    """The newest unfinished upload to this key; older ones are aborted, for their parts cost money and are seen by nobody.
    Not every store or policy lets us look: then there is none.
    """
    try:
        pages = client.get_paginator("list_multipart_uploads").paginate(
            Bucket=where["Bucket"], Prefix=where["Key"]
        )
        few = islice(pages, _MOST_PAGES)
        found = [one for page in few for one in page.get("Uploads", ()) if one["Key"] == where["Key"]]
        found.sort(key=lambda one: str(one.get("Initiated", "")))
        for one in found[-1 - _MOST_ABORTED : -1]:
            client.abort_multipart_upload(**where, UploadId=one["UploadId"])
    except ClientError:
        return None
    return str(found[-1]["UploadId"]) if found else None


def _parts_of(client: Any, upload: dict[str, str]) -> dict[int, Mapping[str, Any]]:
    """Number -> what the store says of a part that it has; nothing when it does not say."""
    try:
        pages = client.get_paginator("list_parts").paginate(**upload)
        return {
            one["PartNumber"]: one for page in islice(pages, _MOST_PAGES) for one in page.get("Parts", ())
        }
    except ClientError:
        return {}


def _complete(client: Any, upload: dict[str, str], tags: list[dict[str, Any]], size: int) -> None:
    try:
        client.complete_multipart_upload(**upload, MultipartUpload={"Parts": tags})
    except ClientError as error:
        # The reply to a first, successful attempt was lost and the SDK asked again: the object tells
        if code_of(error) != "NoSuchUpload":
            raise
        try:
            head = client.head_object(Bucket=upload["Bucket"], Key=upload["Key"])
        except ClientError as gone:
            raise (error if is_missing(gone) else gone) from None
        if head["ContentLength"] != size:
            raise error from None
