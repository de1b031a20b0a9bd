"""A finished adapter from its store to a folder: manifest first, files verified, whole or not at all.

Needs boto3 and the manifest's type alone, so that an adapter can be fetched where no worker is installed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from pydantic import ValidationError

from mlora_worker.protocol import MANIFEST_NAME, AdapterManifest, ManifestFile

_PIECE = 1 << 20


class DownloadError(Exception):
    """Root of what may go wrong here; each kind below has its own exit code in ``mlora fetch``."""


class AdapterNotFound(DownloadError):
    """There is no manifest: nothing was finished there."""


class StoreRefused(DownloadError):
    """The store does not answer, or refuses the keys."""


class AdapterCorrupt(DownloadError):
    """The files are not what the manifest says."""


class FolderInUse(DownloadError):
    """The target folder holds something that is not an adapter."""


@dataclass(frozen=True)
class Access:
    """How to reach a store. Without keys: ``anonymous``, or what the SDK finds (environment, files, role)."""

    endpoint: str | None = None
    region: str | None = None
    access_key: str | None = field(default=None, repr=False)
    secret_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    anonymous: bool = False


class Source(Protocol):
    def read(self, name: str) -> Iterator[bytes]:
        """The pieces of file ``name``. Raises AdapterNotFound or StoreRefused."""


def open_source(uri: str, access: Access) -> Source:
    """The adapter's place. Raises ValueError for an address that is neither s3:// nor file://."""
    parts = urlsplit(uri)
    if parts.scheme == "s3" and parts.netloc:
        _, _, key = uri.removeprefix("s3://").partition("/")
        return _Bucket(parts.netloc, key.strip("/"), access)
    if parts.scheme == "file" and parts.path.startswith("/"):
        return _Folder(Path(unquote(parts.path)))
    raise ValueError(f"{uri!r} is no address of an adapter: write s3://bucket/prefix or file:///folder")


def read_manifest(source: Source) -> AdapterManifest:
    """Raises AdapterNotFound, StoreRefused, AdapterCorrupt."""
    try:
        manifest = AdapterManifest.model_validate_json(b"".join(source.read(MANIFEST_NAME)))
    except AdapterNotFound as error:
        raise AdapterNotFound(f"no finished adapter: {error}") from error
    except ValidationError as error:
        raise AdapterCorrupt(f"{MANIFEST_NAME} is not an adapter's manifest: {error}") from error
    for file in manifest.files:
        if Path(file.name).name != file.name or file.name in (MANIFEST_NAME, "..", "."):
            raise AdapterCorrupt(f"{MANIFEST_NAME} names a file outside of the adapter: {file.name!r}")
    return manifest


def download(
    source: Source, manifest: AdapterManifest, target: Path, progress: Callable[[int], None] = lambda _: None
) -> None:
    """Fetch and verify all files, then put them at ``target``; a former adapter there is replaced.

    ``progress`` is told the bytes of each piece. Until all is verified, nothing at ``target`` changes; a
    killed download leaves a ``.NAME.partial-*`` folder beside it. Raises DownloadError.
    """
    _check_replaceable(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
    try:
        for file in manifest.files:
            _fetch(source, file, partial / file.name, progress)
        content = manifest.model_dump(mode="json", by_alias=True)
        (partial / MANIFEST_NAME).write_text(json.dumps(content, indent=2), encoding="utf-8")
        partial.chmod(0o755)
        _swap(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _check_replaceable(target: Path) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise FolderInUse(f"{target} is a file")
    if any(target.iterdir()) and not (target / MANIFEST_NAME).is_file():
        raise FolderInUse(f"{target} holds something that is not an adapter; empty it or choose another")


def _fetch(source: Source, file: ManifestFile, path: Path, progress: Callable[[int], None]) -> None:
    digest, size = hashlib.sha256(), 0
    try:
        with path.open("wb") as output:
            for piece in source.read(file.name):
                output.write(piece)
                digest.update(piece)
                size += len(piece)
                progress(len(piece))
            output.flush()
            os.fsync(output.fileno())
    except AdapterNotFound as error:
        raise AdapterCorrupt(f"{file.name} is in the manifest but not in the store") from error
    if size != file.bytes:
        raise AdapterCorrupt(f"{file.name} has {size} bytes where the manifest says {file.bytes}")
    if digest.hexdigest() != file.sha256:
        raise AdapterCorrupt(f"{file.name} does not have the SHA-256 that the manifest says")


def _swap(new: Path, target: Path) -> None:
    """By renaming: a reader sees the former adapter, for an instant none, or the new one; no mixture."""
    if not target.exists():
        new.rename(target)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}.old-", dir=target.parent))
    target.rename(old / target.name)
    new.rename(target)
    shutil.rmtree(old)


class _Folder:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, name: str) -> Iterator[bytes]:
        try:
            with (self._folder / name).open("rb") as file:
                while piece := file.read(_PIECE):
                    yield piece
        except FileNotFoundError as error:
            raise AdapterNotFound(f"{self._folder / name} is not there") from error
        except OSError as error:
            raise StoreRefused(f"{self._folder / name}: {error.strerror}") from error


class _Bucket:
    def __init__(self, bucket: str, prefix: str, access: Access) -> None:
        self._bucket = bucket
        self._prefix = prefix
        import boto3  # takes a second to load
        import botocore.config
        from botocore import UNSIGNED

        self._where = access.endpoint or "AWS"
        self._client: Any = boto3.client(
            "s3",
            endpoint_url=access.endpoint,
            region_name=access.region or "us-east-1",
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
                # Bucket names in host names need wildcard DNS, which few own stores have.
                s3={"addressing_style": "path" if access.endpoint else "auto"},
            ),
        )

    def read(self, name: str) -> Iterator[bytes]:
        from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

        key = f"{self._prefix}/{name}" if self._prefix else name
        try:
            answer = self._client.get_object(Bucket=self._bucket, Key=key)
            yield from answer["Body"].iter_chunks(_PIECE)
        except ClientError as error:
            raise self._explained(error, key) from error
        except NoCredentialsError as error:
            raise StoreRefused("no keys found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY") from error
        except BotoCoreError as error:
            raise StoreRefused(f"the store {self._where} does not answer: {error}") from error

    def _explained(self, error: Any, key: str) -> DownloadError:
        code = str(error.response.get("Error", {}).get("Code", ""))
        if code in ("NoSuchKey", "NoSuchBucket", "404"):
            return AdapterNotFound(f"s3://{self._bucket}/{key} is not in the store {self._where}")
        return StoreRefused(f"the store {self._where} refuses s3://{self._bucket}/{key}: {code or error}")
