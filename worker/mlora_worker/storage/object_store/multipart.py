"""A large file uploaded part by part, in next to no memory, and taken up where a former try ended.

An upload that broke off for a passing reason (no connection, a full store's 503, keys that have expired) stays on the
store, invisible to readers. The next try lists its parts and sends those alone that are not there or are not the same. A
part is the same when its size is, and its tag is the MD5 of what would be sent; stores whose tags are no digests get every
part again. Any other failure aborts the upload.
"""

from __future__ import annotations

import contextlib
import hashlib
from itertools import islice
from pathlib import Path
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError, ConnectionError, HTTPClientError

from mlora_worker.storage.object_store.s3_errors import code_of, is_missing, is_passing, status_of
from mlora_worker.storage.object_store.slices import FileSlice

_PIECE = 2**20
PART = 16 * 2**20  # bytes of one part; S3 wants at least 5 MiB
MOST_PARTS = 10_000  # S3's limit
_MOST_PAGES = (
    20  # of a list, each with up to a thousand entries: a store that knows no end of it is asked no further
)
_MOST_ABORTED = 100  # older uploads at once

_KEYS = {401, 403}  # that have expired, or lack a right: new ones may come


def part_size(size: int, part: int) -> int:
    """Bytes of each part of a file of ``size`` bytes: ``part``, or more where that would be too many."""
    return max(part, -(-size // MOST_PARTS))


def upload_in_parts(client: Any, where: dict[str, str], path: Path, part: int, size: int) -> None:
    """``where``: Bucket and Key. Raises what the client raises, OSError when the file cannot be read."""
    former = _former_upload(client, where)
    try:
        _upload(client, where, former, path, part, size)
    except ClientError as error:
        if former is None or code_of(error) != "NoSuchUpload":
            raise
        _upload(
            client, where, None, path, part, size
        )  # somebody, or the store's own rule, has removed it meanwhile


def _upload(client: Any, where: dict[str, str], former: str | None, path: Path, part: int, size: int) -> None:
    present = _parts_of(client, {**where, "UploadId": former}) if former is not None else {}
    upload = {**where, "UploadId": former or client.create_multipart_upload(**where)["UploadId"]}
    try:
        tags: list[dict[str, Any]] = []
        for number, start in enumerate(range(0, size, part), start=1):
            with FileSlice(path, start, min(part, size - start)) as data:
                tag = _same(present.get(number), data)
                if tag is None:
                    # It is handed back as it comes: it is a digest on some stores only.
                    tag = client.upload_part(**upload, PartNumber=number, Body=data)["ETag"]
            tags.append({"PartNumber": number, "ETag": tag})
        _complete(client, upload, tags, size)
    except Exception as error:
        if not _is_passing(error):
            with contextlib.suppress(ClientError, BotoCoreError):
                client.abort_multipart_upload(**upload)
        raise


def _is_passing(error: Exception) -> bool:
    if isinstance(error, ClientError):
        return status_of(error) in _KEYS or is_passing(error)
    return isinstance(error, ConnectionError | HTTPClientError)


def _same(present: tuple[str, int] | None, data: FileSlice) -> str | None:
    """The tag of a part that the store has already, if it holds ``data``."""
    if present is None or present[1] != len(data):
        return None
    sum_ = hashlib.md5(usedforsecurity=False)
    while piece := data.read(_PIECE):
        sum_.update(piece)
    data.seek(0)
    digest = sum_.hexdigest()
    return present[0] if present[0].strip('"').lower() == digest else None


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


def _parts_of(client: Any, upload: dict[str, str]) -> dict[int, tuple[str, int]]:
    """Number -> tag and size of what the store has; nothing when it does not say."""
    try:
        pages = client.get_paginator("list_parts").paginate(**upload)
        return {
            one["PartNumber"]: (one["ETag"], one["Size"])
            for page in islice(pages, _MOST_PAGES)
            for one in page.get("Parts", ())
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
