"""Where addresses lead, as far as that can be read off them: one store under two host names is two stores here. Pure."""

from __future__ import annotations

from functools import lru_cache
from urllib.parse import urlsplit

from mlora_operator.reconcile.snapshot import Task

Folder = tuple[str, ...]  # the store, then the parts of the path; for S3 the bucket is the first of them

_AWS = "aws"
_DEFAULT_PORTS = {"http": 80, "https": 443}


@lru_cache(maxsize=50_000)
def folder(endpoint: str | None, uri: str) -> Folder:
    """Where ``uri`` leads. The same for spellings that differ in repeated or trailing slashes, in the case of the host, in
    a port that is the scheme's own anyway, and in the cluster's suffix of a Service's name; and for all of AWS, whose
    buckets have one name each.
    """
    scheme, _, path = uri.partition("://")
    parts = tuple(part for part in path.split("/") if part)
    if scheme != "s3":
        return scheme, *(part for part in parts if part != ".")
    return _store(endpoint), *parts


def overlap(one: Folder, other: Folder) -> bool:
    """Equal, or one lies in the other."""
    shorter = min(len(one), len(other))
    return one[:shorter] == other[:shorter]


def inside(place: Folder, other: Folder) -> bool:
    """``place`` is ``other``, or lies in it."""
    return place[: len(other)] == other


def output_of(task: Task) -> Folder:
    assert task.spec is not None
    return folder(task.spec.storage.endpoint, task.spec.output.uri)


def _store(endpoint: str | None) -> str:
    if endpoint is None:
        return _AWS
    try:
        parts = urlsplit(endpoint)
    except ValueError:  # no address, such as brackets without an end: the worker will say so
        return endpoint
    host = (parts.hostname or "").removesuffix(".")
    host = host.removesuffix(".cluster.local").removesuffix(".svc")
    if host.endswith((".amazonaws.com", ".amazonaws.com.cn")) and host.startswith(("s3.", "s3-")):
        return _AWS
    try:
        port = parts.port
    except ValueError:  # no number: the worker will say so
        port = None
    return f"{host}:{port or _DEFAULT_PORTS.get(parts.scheme, 0)}{parts.path.rstrip('/')}"


def is_whole_bucket(place: Folder) -> bool:
    """It names no prefix in its bucket: whoever had it would have all that lies there."""
    return place[0] != "file" and len(place) <= 2
