"""A store of objects under ``s3://`` or ``file://`` addresses, and how one is opened."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from pydantic import SecretStr

from mlora_worker.protocol import FailureReason, StorageAccess
from mlora_worker.storage import uri as address
from mlora_worker.storage.egress_policy import Destinations
from mlora_worker.storage.errors import AccessRefused, StorageError
from mlora_worker.storage.object_store.file_store import FileStore
from mlora_worker.storage.object_store.s3 import S3Store
from mlora_worker.storage.object_store.s3_client import (
    AMBIENT,
    DEFAULT_TIMEOUTS,
    PLAIN,
    Keys,
    S3Options,
    S3Timeouts,
)

CA_CERTIFICATE = "ca.crt"  # in a storage Secret
HUB_TOKEN = "HF_TOKEN"


class Store(Protocol):
    """Every method raises ``StorageError``; ``ObjectNotFound`` where the object or its bucket is missing."""

    def read(self, uri: str, most: int) -> bytes:
        """The whole object, whatever the store says of its size. Raises TooLarge once there are more than ``most`` bytes,
        and keeps no more in memory."""
        ...

    def read_range(self, uri: str, start: int, length: int) -> bytes:
        """Exactly ``length`` bytes from ``start``, and no more are taken; an object that ends before is an error."""
        ...

    def pieces(self, uri: str) -> Iterator[bytes]:
        """The whole object, one part after the other: a large one is never held whole."""
        ...

    def size(self, uri: str) -> int: ...

    def version(self, uri: str) -> str:
        """Two equal answers mean the same bytes at this address; it is given to those only who may read them."""
        ...

    def origin(self, uri: str) -> str:
        """What serves ``uri``, where that alone does not say: the same address elsewhere is another object."""
        ...

    def exists(self, uri: str) -> bool: ...

    def write(self, uri: str, data: bytes) -> None:
        """Whole or not at all."""
        ...

    def write_file(self, uri: str, path: Path) -> None:
        """Whole or not at all, in bounded memory; what a killed earlier attempt left behind is removed."""
        ...

    def delete(self, uri: str) -> None:
        """No error when it is not there."""
        ...

    def list(self, prefix: str, most: int) -> list[str]:
        """Addresses of all objects below the folder ``prefix``, sorted; empty when there are none. More than ``most`` are
        an error, and so are names that are longer than any store's."""
        ...


def open_store(
    access: StorageAccess,
    *,
    allow_files: bool,
    allowed_networks: Sequence[str] = (),
    missing: FailureReason = FailureReason.DATASET_NOT_FOUND,
    timeouts: S3Timeouts = DEFAULT_TIMEOUTS,
) -> Store:
    """The store of one task. Without keys, requests are unsigned: a task never borrows the worker's own
    identity. It is reached only at addresses that tasks may reach (``egress_policy``), or in ``allowed_networks``.

    ``missing`` is the reason of an ``ObjectNotFound``.
    """
    keys = _keys_of(access)
    s3 = S3Store(
        endpoint=access.endpoint,
        region=access.region,
        keys=lambda: keys,
        missing=missing,
        timeouts=timeouts,
        options=S3Options.of(access),
        ca_certificate=lambda: access.ca_certificate,
        destinations=Destinations(allowed_networks),
    )
    return _Routed(s3, FileStore(missing) if allow_files else None)


def open_store_from_files(
    endpoint: str | None,
    region: str,
    keys_dir: str | Path | None,
    allow_files: bool,
    *,
    missing: FailureReason = FailureReason.INVALID_SPEC,
    timeouts: S3Timeouts = DEFAULT_TIMEOUTS,
    options: S3Options = PLAIN,
) -> Store:
    """The store of a pipeline's model. ``keys_dir`` is a mounted Secret with AWS_ACCESS_KEY_ID,
    AWS_SECRET_ACCESS_KEY and perhaps AWS_SESSION_TOKEN and ca.crt, read at each use, so that rotated keys are taken up
    without a restart. Without ``keys_dir``, the identity that the SDK finds (the pod's own) is
    used.
    """
    folder = Path(keys_dir) if keys_dir is not None else None
    s3 = S3Store(
        endpoint=endpoint,
        region=region,
        keys=lambda: AMBIENT if folder is None else read_keys(folder),
        missing=missing,
        timeouts=timeouts,
        options=options,
        ca_certificate=lambda: None if folder is None else read_ca_certificate(folder),
    )
    return _Routed(s3, FileStore(missing) if allow_files else None)


def read_ca_certificate(folder: Path) -> str | None:
    """Of those who may sign the store's certificate; None: the usual ones. Raises AccessRefused for an unreadable file."""
    return _optional(folder / CA_CERTIFICATE, "certificate")


def read_hub_token(folder: Path) -> str | None:
    """For models on a hub; None: they are asked for without one. Raises AccessRefused for an unreadable file."""
    return _optional(folder / HUB_TOKEN, "token")


def _optional(path: Path, what: str) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip() or None
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise AccessRefused(f"the {what} {path} cannot be read ({type(error).__name__})") from None


def read_keys(folder: Path) -> Keys:
    """Raises AccessRefused that names the file which is missing or empty, never what is in it."""

    def value(name: str) -> str:
        try:
            return (folder / name).read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return ""
        except (OSError, UnicodeDecodeError) as error:
            raise AccessRefused(
                f"the key file {folder / name} cannot be read ({type(error).__name__})"
            ) from None

    access_key, secret_key = value("AWS_ACCESS_KEY_ID"), value("AWS_SECRET_ACCESS_KEY")
    for name, found in (("AWS_ACCESS_KEY_ID", access_key), ("AWS_SECRET_ACCESS_KEY", secret_key)):
        if not found:
            raise AccessRefused(
                f"the key file {folder / name} is missing or empty: add {name} to the Secret mounted there"
            )
    return Keys(access_key, secret_key, value("AWS_SESSION_TOKEN") or None)


def _keys_of(access: StorageAccess) -> Keys | None:
    def plain(secret: SecretStr | None) -> str:
        # Keys that came through `echo key | base64` end in a newline.
        return secret.get_secret_value().strip() if secret is not None else ""

    access_key, secret_key = plain(access.access_key), plain(access.secret_key)
    if not access_key and not secret_key:
        return None
    if not access_key or not secret_key:
        half = "secret key" if access_key else "access key"
        raise AccessRefused(
            f"the {half} is missing or empty: the storage Secret needs AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY"
        )
    return Keys(access_key, secret_key, plain(access.session_token) or None)


class _Routed:
    """Sends each address to the store of its scheme."""

    def __init__(self, s3: Store, files: Store | None) -> None:
        self._s3 = s3
        self._files = files

    def _of(self, uri: str) -> Store:
        if address.scheme(uri) == address.S3:
            return self._s3
        if self._files is None:
            raise StorageError(
                FailureReason.INVALID_SPEC,
                f"{uri} is on a local disk that a pipeline in a cluster cannot read: use an s3:// address "
                "(file:// is for `mlora run` only)",
            )
        return self._files

    def read(self, uri: str, most: int) -> bytes:
        return self._of(uri).read(uri, most)

    def read_range(self, uri: str, start: int, length: int) -> bytes:
        return self._of(uri).read_range(uri, start, length)

    def pieces(self, uri: str) -> Iterator[bytes]:
        return self._of(uri).pieces(uri)

    def size(self, uri: str) -> int:
        return self._of(uri).size(uri)

    def version(self, uri: str) -> str:
        return self._of(uri).version(uri)

    def origin(self, uri: str) -> str:
        return self._of(uri).origin(uri)

    def exists(self, uri: str) -> bool:
        return self._of(uri).exists(uri)

    def write(self, uri: str, data: bytes) -> None:
        self._of(uri).write(uri, data)

    def write_file(self, uri: str, path: Path) -> None:
        self._of(uri).write_file(uri, path)

    def delete(self, uri: str) -> None:
        self._of(uri).delete(uri)

    def list(self, prefix: str, most: int) -> list[str]:
        return self._of(prefix).list(prefix, most)
