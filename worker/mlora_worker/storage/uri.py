"""The two kinds of address of a store: ``s3://bucket/key`` and ``file:///absolute/path``; and endpoints of stores. Pure.

What an address means is read by ``mlora_worker.addresses`` alone: where a user's text comes in, the types of the protocol
hold it to the grammar there, and here the same parser also takes what stores list themselves.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

from mlora_worker import addresses
from mlora_worker.addresses import S3Address
from mlora_worker.protocol import FailureReason
from mlora_worker.storage.errors import StorageError

__all__ = ["FILE", "S3", "S3Address"]

S3 = "s3"
FILE = "file"


def scheme(uri: str) -> str:
    """``s3`` or ``file``. Raises StorageError (InvalidSpec) for anything else."""
    found = uri.partition("://")[0]
    if "://" in uri and found in (S3, FILE):
        return found
    raise StorageError(
        FailureReason.INVALID_SPEC,
        f"{uri!r} is not the address of a store: write s3://bucket/key or file:///absolute/path",
    )


def is_file(uri: str) -> bool:
    return uri.startswith(f"{FILE}://")


def s3_address(uri: str) -> S3Address:
    """Of a user or of a store's list. Keys are taken literally: they may hold ``%``, ``?`` and ``#``. Raises StorageError
    (InvalidSpec)."""
    try:
        return addresses.s3_object(uri)
    except addresses.NotAnAddress as error:
        raise StorageError(FailureReason.INVALID_SPEC, str(error)) from None


def file_path(uri: str) -> Path:
    """Of a user or of a folder's list. ``file:///a%20b`` and ``file:///a b`` are the same path. Raises StorageError
    (InvalidSpec) for relative paths and foreign hosts.
    """
    try:
        return Path(addresses.file_object(uri))
    except addresses.NotAnAddress as error:
        raise StorageError(FailureReason.INVALID_SPEC, str(error)) from None


def file_uri(path: Path) -> str:
    return path.absolute().as_uri()


def file_pattern(uri: str) -> str:
    """``uri``, in which ``*`` stands for names, spelt as ``file_uri`` spells files."""
    return f"{FILE}://{quote(str(file_path(uri)), safe='/*')}"


def normal_endpoint(endpoint: str) -> str:
    """One spelling for endpoints that are the same: case of the host, default port, slash at the end. What is no address
    stays what it is."""
    try:
        site = addresses.endpoint(endpoint)
    except addresses.NotAnAddress:
        return endpoint
    return site.origin + site.path


def join(folder: str, name: str) -> str:
    """The address of ``name`` in ``folder``; a trailing slash of the folder makes no difference."""
    return f"{folder.rstrip('/')}/{name}"


def name_below(folder: str, uri: str) -> str:
    """``uri`` relative to ``folder``, such as ``config.json``; both of the same kind."""
    if is_file(uri):
        return file_path(uri).relative_to(file_path(folder)).as_posix()
    return uri.removeprefix(folder.rstrip("/") + "/")
