"""Where addresses lead, as far as that can be read off them: one store under two host names is two stores here. Pure."""

from __future__ import annotations

from functools import lru_cache

from mlora_operator.reconcile.state.snapshot import Task
from mlora_worker import addresses

Folder = tuple[str, ...]  # the store, then the parts of the path; for S3 the bucket is the first of them

_AWS = "aws"


@lru_cache(maxsize=50_000)
def folder(endpoint: str | None, uri: str) -> Folder:
    """Where ``uri`` leads, as whoever reads or writes there understands it (``mlora_worker.addresses``). The same for
    endpoints that differ in the case of the host, in a port that is the scheme's own anyway, and in the cluster's suffix
    of a Service's name; and for all of AWS, whose buckets have one name each. Of the web and of hubs, each address is a
    place of its own: nothing is written there.
    """
    if not uri.startswith(("s3://", "file://")):
        return ("elsewhere", uri)
    kind, *parts = addresses.place(uri)
    return (_store(endpoint) if kind == "s3" else kind), *parts


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
    site = addresses.endpoint(endpoint)
    host = site.host.removesuffix(".cluster.local").removesuffix(".svc")
    if host.endswith((".amazonaws.com", ".amazonaws.com.cn")) and host.startswith(("s3.", "s3-")):
        return _AWS
    return f"{host}:{site.port}{site.path}"


def is_whole_bucket(place: Folder) -> bool:
    """It names no prefix in its bucket: whoever had it would have all that lies there."""
    return place[0] != "file" and len(place) <= 2
