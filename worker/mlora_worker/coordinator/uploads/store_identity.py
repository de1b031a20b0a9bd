"""What may be silent or refuse on its own: one bucket with one set of keys, one mounted volume, one server.

No place is asked for it: a network file system that hangs would hang whoever looks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from mlora_worker import addresses
from mlora_worker.protocol import StorageAccess, TaskPlan
from mlora_worker.storage.errors import StorageError
from mlora_worker.storage.uri import FILE, S3, file_path, normal_endpoint, s3_address

StoreIdentity = tuple[str, ...]
PIPELINE_STORE: StoreIdentity = (
    "pipeline",
)  # its place for the checkpoints of all its tasks, with its own keys
_MOUNTS = Path("/proc/self/mountinfo")


def output_store(plan: TaskPlan) -> StoreIdentity:
    """Where its adapter goes."""
    return store_of(plan.output_uri, plan.storage)


def input_stores(plan: TaskPlan) -> tuple[StoreIdentity, ...]:
    """All that is asked before it may train: its output, its rows, what it starts from."""
    rows, evaluation = plan.dataset, plan.evaluation
    found = [plan.output_uri, rows.uri, *(rows.uris or ())]
    found.append(evaluation.uri if evaluation is not None else None)
    found.append(plan.init_from.uri if plan.init_from is not None else None)
    return tuple(sorted({store_of(uri, plan.storage) for uri in found if uri is not None}))


def store_of(
    uri: str, access: StorageAccess, mounts: Callable[[], str] = lambda: _read(_MOUNTS)
) -> StoreIdentity:
    """Equal where one silence says something of the other. Never raises: what is no address is a place of its own.

    The keys are part of it, as a digest, so that new ones are tried at once.
    """
    kind = uri.partition("://")[0]
    try:
        if kind == S3:
            server = normal_endpoint(access.endpoint) if access.endpoint is not None else access.region
            return (S3, server, s3_address(uri).bucket, _digest(access))
        if kind == FILE:
            return (FILE, mount_of(file_path(uri), mounts()))
        if kind in ("http", "https"):
            return ("web", addresses.web(uri).origin)
        return (kind, _digest(access))
    except (StorageError, ValueError):
        return ("unknown", uri)


def mount_of(path: Path, mountinfo: str) -> str:
    """Where the volume is mounted that ``path`` lies on, symbolic links aside. ``mountinfo``: as in proc(5)."""
    longest = "/"
    for line in mountinfo.splitlines():
        fields = line.split(" ")
        if len(fields) < 5:
            continue
        mount = fields[4].encode().decode("unicode_escape")  # a blank is written \\040
        if path.is_relative_to(mount) and len(mount) > len(longest):
            longest = mount
    return longest


def _digest(access: StorageAccess) -> str:
    secrets = (access.access_key, access.secret_key, access.session_token, access.hub_token)
    plain = [secret.get_secret_value() if secret is not None else None for secret in secrets]
    encryption = (access.server_side_encryption, access.kms_key_id)
    facts = repr((plain, access.ca_certificate, access.addressing, access.checksums, encryption))
    return hashlib.sha256(facts.encode(errors="backslashreplace")).hexdigest()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
