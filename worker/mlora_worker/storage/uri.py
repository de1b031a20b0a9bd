"""The two kinds of address: ``s3://bucket/key`` and ``file:///absolute/path``; and endpoints of stores. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from mlora_worker.protocol import FailureReason
from mlora_worker.storage.errors import StorageError

S3 = "s3"
FILE = "file"
_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class S3Address:
    bucket: str
    key: str  # without a leading slash; may be empty for a whole bucket


def scheme(uri: str) -> str:
    """``s3`` or ``file``. Raises StorageError (InvalidSpec) for anything else."""
    found = uri.partition("://")[0]
    if "://" in uri and found in (S3, FILE):
        return found
    raise StorageError(
        FailureReason.INVALID_SPEC,
        f"{uri!r} is no address of a store: write s3://bucket/key or file:///absolute/path",
    )


def is_file(uri: str) -> bool:
    return uri.startswith(f"{FILE}://")


def s3_address(uri: str) -> S3Address:
    """Keys are taken literally: S3 keys may hold ``%``, ``?`` and ``#``."""
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    if not uri.startswith("s3://") or not bucket:
        raise StorageError(FailureReason.INVALID_SPEC, f"{uri!r} names no bucket: write s3://bucket/key")
    return S3Address(bucket, key)


def file_path(uri: str) -> Path:
    """``file:///a%20b`` and ``file:///a b`` are the same path. Relative paths and foreign hosts are
    refused.
    """
    try:
        parts = urlsplit(uri, allow_fragments=False)
        path = Path(unquote(parts.path))
        good = (
            parts.scheme == FILE
            and parts.netloc in ("", "localhost")
            and path.is_absolute()
            and not parts.query
        )
    except ValueError:  # brackets without an end
        good = False
    if not good:
        raise StorageError(
            FailureReason.INVALID_SPEC,
            f"{uri!r} is no absolute path: write file:///folder/name, three slashes",
        )
    return path


def file_uri(path: Path) -> str:
    return path.absolute().as_uri()


def file_pattern(uri: str) -> str:
    """``uri``, in which ``*`` stands for names, spelt as ``file_uri`` spells files."""
    return f"{FILE}://{quote(str(file_path(uri)), safe='/*')}"


def normal_endpoint(endpoint: str) -> str:
    """One spelling for endpoints that are the same: case of scheme and host, default port, dot and slash at the end."""
    endpoint = endpoint.strip()
    try:
        parts = urlsplit(endpoint)
        host, port = (parts.hostname or "").removesuffix("."), parts.port
    except ValueError:  # brackets without an end, a port that is no number
        return endpoint
    host = f"[{host}]" if ":" in host else host
    shown = "" if port in (None, _DEFAULT_PORTS.get(parts.scheme)) else f":{port}"
    return f"{parts.scheme}://{host}{shown}{parts.path.rstrip('/')}" if host else endpoint


def join(folder: str, name: str) -> str:
    """The address of ``name`` in ``folder``; a trailing slash of the folder makes no difference."""
    return f"{folder.rstrip('/')}/{name}"


def name_below(folder: str, uri: str) -> str:
    """``uri`` relative to ``folder``, such as ``config.json``; both of the same kind."""
    if is_file(uri):
        return file_path(uri).relative_to(file_path(folder)).as_posix()
    return uri.removeprefix(folder.rstrip("/") + "/")
