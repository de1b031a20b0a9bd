"""Stores that adapters are read from: S3 and a folder."""

from __future__ import annotations

import atexit
import copy
import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from mlora_operator.download.errors import (
    AdapterCorrupt,
    AdapterNotFound,
    DownloadError,
    StoreRefused,
    StoreSilent,
)

PIECE = 1 << 20
# A symbolic link, a folder, and a socket or a pipe that cannot be opened.
_NO_FILE = {errno.ELOOP, errno.EISDIR, errno.ENXIO}
_NOT_NOW = {"SlowDown", "RequestTimeout", "TooManyRequests", "Throttling", "ThrottlingException", "429"}


@dataclass(frozen=True)
class Access:
    """How to reach a store. Without keys: ``anonymous``, or what the SDK finds (environment, files, role).

    ``addressing`` is path (http://host/bucket/key), virtual (http://bucket.host/key) or auto: path with an endpoint.
    ``ca_certificate`` is the PEM text of those who may sign the store's certificate; without it, the usual ones or
    those in the file that AWS_CA_BUNDLE names.
    """

    endpoint: str | None = None
    region: str | None = None
    access_key: str | None = field(default=None, repr=False)
    secret_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    anonymous: bool = False
    addressing: str = "auto"
    ca_certificate: str | None = None


class AdapterSource(Protocol):
    def read(self, name: str, start: int = 0) -> Iterator[bytes]:
        """The pieces of file ``name`` from byte ``start`` on, which must lie within it.

        Raises AdapterNotFound, AdapterCorrupt for what is no file, StoreRefused or StoreSilent, this one also after some
        pieces.
        """


class AdapterFolders(AdapterSource, Protocol):
    """An address that may be an adapter's, or that of a prefix with adapters below it."""

    def names(self) -> Iterator[str]:
        """What there is directly below, as the store calls it: each may be the name of an adapter's folder.

        Raises StoreRefused or StoreSilent, also after some names.
        """

    def below(self, name: str) -> AdapterFolders:
        """The folder ``name``, which must be one that a folder may have."""


def open_source(uri: str, access: Access) -> AdapterFolders:
    """The place of an adapter, or of several. Raises ValueError for an address that is neither s3:// nor file://."""
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    if uri.startswith("s3://") and bucket:
        return _Bucket(bucket, key.strip("/"), access)
    folder = _folder_of(uri) if uri.startswith("file://") else None
    if folder is not None:
        return _Folder(folder)
    raise ValueError(f"{uri!r} is not the address of an adapter: write s3://bucket/prefix or file:///folder")


def _folder_of(uri: str) -> Path | None:
    """None where it is no absolute path; a name may have # in it."""
    try:
        parts = urlsplit(uri, allow_fragments=False)
    except ValueError:
        return None
    good = parts.netloc in ("", "localhost") and parts.path.startswith("/") and not parts.query
    return Path(unquote(parts.path)) if good else None


class _Folder:
    """``given``: by the user, who may name a link. Links within the folder are not followed: whoever may write there
    could show what others keep elsewhere."""

    def __init__(self, folder: Path, given: bool = True) -> None:
        self._folder = folder
        self._given = given

    def read(self, name: str, start: int = 0) -> Iterator[bytes]:
        try:
            with self._opened(name) as file:
                file.seek(start)
                while piece := file.read(PIECE):
                    yield piece
        except FileNotFoundError as error:
            raise AdapterNotFound(f"{self._folder / name} does not exist") from error
        except OSError as error:
            raise StoreRefused(f"{self._folder / name}: {error.strerror}") from error

    def names(self) -> Iterator[str]:
        try:
            with os.scandir(self._folder) as found:
                yield from (one.name for one in found if one.is_dir())
        except OSError as error:
            raise StoreRefused(f"{self._folder}: {error.strerror}") from error

    def below(self, name: str) -> AdapterFolders:
        return _Folder(self._folder / name, given=False)

    def _opened(self, name: str) -> BufferedReader:
        """Raises OSError, and AdapterCorrupt for what is no file: a pipe would keep its reader for ever."""
        if not self._given and self._folder.is_symlink():
            raise AdapterCorrupt(
                f"{self._folder} is a symbolic link, which is not followed: give its own address"
            )
        path = self._folder / name
        follow = 0 if self._given else os.O_NOFOLLOW  # it may have become a link since
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | follow)
        try:
            file = open(name, "rb", opener=partial(_opened_in, folder))  # noqa: SIM115 - the caller closes it
        except OSError as error:
            if error.errno in _NO_FILE:
                raise AdapterCorrupt(_no_file(path)) from error
            raise
        finally:
            os.close(folder)
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise AdapterCorrupt(_no_file(path))
        return file


class _Bucket:
    def __init__(self, bucket: str, prefix: str, access: Access) -> None:
        self._bucket = bucket
        self._prefix = prefix
        import boto3  # takes a second to load
        import botocore.config
        from botocore import UNSIGNED

        # As the AWS tools read it; known here, since it decides how a bucket is addressed.
        endpoint = (
            access.endpoint
            or os.environ.get("AWS_ENDPOINT_URL_S3")
            or os.environ.get("AWS_ENDPOINT_URL")
            or None
        )
        self._where = endpoint or "AWS"
        addressing = access.addressing
        if addressing == "auto" and endpoint is not None:
            addressing = "path"  # bucket names in host names need wildcard DNS, which few own stores have
        session = boto3.session.Session()
        self._client: Any = session.client(
            "s3",
            endpoint_url=endpoint,
            verify=_certificates(access.ca_certificate),
            region_name=access.region or session.region_name or "us-east-1",
            aws_access_key_id=access.access_key,
            aws_secret_access_key=access.secret_key,
            aws_session_token=access.session_token,
            config=botocore.config.Config(
                signature_version=UNSIGNED if access.anonymous else None,
                connect_timeout=10,
                retries={"mode": "standard", "total_max_attempts": 4},
                # Stores other than AWS may not know the SDK's newer checksums; the manifest has ours.
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                s3={"addressing_style": addressing},
            ),
        )

    def read(self, name: str, start: int = 0) -> Iterator[bytes]:
        key = self._key(name)
        part = {"Range": f"bytes={start}-"} if start else {}
        with self._errors(key):
            answer = self._client.get_object(Bucket=self._bucket, Key=key, **part)
            body = answer["Body"]
            if start and answer["ResponseMetadata"]["HTTPStatusCode"] != 206:
                for size in _pieces_of(start):  # a store that knows no ranges sends everything
                    body.read(size)
            yield from body.iter_chunks(PIECE)

    def names(self) -> Iterator[str]:
        prefix = self._key("")
        try:
            with self._errors(prefix):
                pages = self._client.get_paginator("list_objects_v2").paginate(
                    Bucket=self._bucket, Prefix=prefix, Delimiter="/"
                )
                for page in pages:
                    for folder in page.get("CommonPrefixes", ()):
                        yield folder["Prefix"].removeprefix(prefix).removesuffix("/")
        except AdapterNotFound as error:  # the bucket is not there, which is no empty prefix
            raise StoreRefused(str(error)) from error

    def below(self, name: str) -> AdapterFolders:
        folder = copy.copy(self)  # with the same client: making one takes long
        folder._prefix = self._key(name)
        return folder

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix else name

    @contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        """The SDK's errors as those of this package."""
        from botocore import exceptions
        from urllib3.exceptions import HTTPError

        try:
            yield
        except exceptions.ClientError as error:
            raise self._explained(error, key) from error
        except exceptions.NoCredentialsError as error:
            raise StoreRefused("no keys found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY") from error
        except exceptions.SSLError as error:
            raise StoreRefused(f"the store {self._where} cannot be trusted: {error}") from error
        except (
            exceptions.HTTPClientError,
            exceptions.ConnectionError,
            exceptions.IncompleteReadError,
            # The SDK lets these through where a connection breaks in the body of an answer.
            HTTPError,
            ConnectionResetError,
            ConnectionAbortedError,
            BrokenPipeError,
        ) as error:
            raise StoreSilent(f"the store {self._where} does not answer: {error}") from error
        except exceptions.BotoCoreError as error:
            raise StoreRefused(f"s3://{self._bucket}/{key} cannot be requested: {error}") from error

    def _explained(self, error: Any, key: str) -> DownloadError:
        code = str(error.response.get("Error", {}).get("Code", ""))
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        if code in ("NoSuchKey", "NoSuchBucket", "404"):
            return AdapterNotFound(f"s3://{self._bucket}/{key} is not in the store {self._where}")
        if status >= 500 or code in _NOT_NOW:
            return StoreSilent(f"the store {self._where} is temporarily unavailable: {code or error}")
        if code == "InvalidRange":  # the object became shorter than what a former try had got of it
            return AdapterCorrupt(f"s3://{self._bucket}/{key} is shorter than its manifest states")
        return StoreRefused(f"the store {self._where} refuses s3://{self._bucket}/{key}: {code or error}")


def _opened_in(folder: int, name: str, flags: int) -> int:
    return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)


def _no_file(path: Path) -> str:
    return f"{path} is not a regular file: put the file itself there, no link, folder, pipe or device"


def _pieces_of(size: int) -> Iterator[int]:
    yield from [PIECE] * (size // PIECE)
    if size % PIECE:
        yield size % PIECE


def _certificates(text: str | None) -> str | None:
    """The SDK wants a file, and reads it at each connection: it goes when the program ends."""
    if text is None:
        return None
    file = tempfile.NamedTemporaryFile("w", prefix="mlora-ca-", suffix=".pem", delete=False)  # noqa: SIM115
    with file:
        file.write(text)
    atexit.register(Path(file.name).unlink, missing_ok=True)
    return file.name
