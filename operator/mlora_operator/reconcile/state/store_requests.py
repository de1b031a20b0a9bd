"""What a worker requests of a store for an address: which host, and which path there. Pure.

An endpoint, a bucket and a key have many spellings of one request: a bucket may stand in the endpoint's path, in its host's
name, or be made of both. So what is compared is the request, not how a spec writes it. ``addressing`` decides as the SDK
does: without an endpoint it is AWS, which knows its buckets by their names; with one, ``auto`` and ``path`` put the bucket
into the path, and ``virtual`` before the host, but where it cannot be part of that name, into the path as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from ipaddress import ip_address
from typing import Final, NamedTuple
from urllib.parse import unquote

from mlora_worker import addresses
from mlora_worker.protocol import Addressing

Parts = tuple[str, ...]

AWS: Final = "aws"
_S3: Final = "s3"
_OF_AWS = re.compile(
    r"(?:(?P<bucket>.+)\.)?"
    r"(?:bucket\.vpce-[a-z0-9-]+\.s3\.[a-z0-9-]+\.vpce|s3(?:-[a-z0-9-]+)?(?:\.dualstack)?(?:\.[a-z0-9-]+)?)"
    r"\.amazonaws\.(?:com|com\.cn|eu)"
)
_ALWAYS_IN_HOST = "--x-s3"  # ends names of AWS's directory buckets, which the SDK never puts into a path


class StoreRequest(NamedTuple):
    store: Parts  # what no bucket is part of: AWS, or a port, with an IP address if the host has one
    host: Parts  # the parts of its name, the topmost first; of AWS the bucket alone
    path: Parts
    buckets: int  # how many of the path's first parts may be the bucket's name


@lru_cache(maxsize=4096)  # several rules ask of the same task, one after the other
def of_s3(endpoint: str | None, addressing: Addressing, uri: str) -> tuple[StoreRequest, ...]:
    """For what lies at ``uri``: one, or with ``virtual`` two, since other names of buckets go into the path there."""
    bucket, key = addresses.s3(uri)
    parts = tuple(key.split("/")) if key else ()
    if endpoint is None:
        return (StoreRequest((AWS,), (bucket,), parts, 0),)
    site = addresses.endpoint(endpoint)
    below = tuple(part for part in site.path.split("/") if part)
    in_path = _request(site, "", (*below, bucket, *parts), len(below) + 1)
    if addressing is not Addressing.VIRTUAL and not bucket.endswith(_ALWAYS_IN_HOST):
        return (in_path,)
    return in_path, _request(site, f"{bucket}.", (*below, *parts), len(below) + 1)


def of_web(url: str) -> StoreRequest:
    """For a file on the web: its server may be a store, too."""
    site = addresses.web(url)
    path = tuple(part for part in unquote(site.path, errors="surrogateescape").split("/") if part)
    return _request(site, "", path, 1)


def hosts(endpoint: str, addressing: Addressing, uris: Iterable[str]) -> Iterator[str]:
    """That requests for ``uris`` go to, of those with the bucket in the host's name."""
    for uri in uris:
        if uri.startswith("s3://") and len(of_s3(endpoint, addressing, uri)) > 1:
            yield f"{addresses.s3(uri).bucket}.{addresses.endpoint(endpoint).host}"


def buckets_of(request: StoreRequest) -> Iterator[tuple[str, Parts]]:
    """Every bucket that a store may read in the request, and the key's parts: from its host's name as many of the first
    parts as it likes, else the first part of the path, or a later one where the endpoint has a path.
    """
    for first in range(len(request.host)):
        yield ".".join(reversed(request.host[first:])), request.path
    for at in range(min(request.buckets, len(request.path))):
        yield request.path[at], request.path[at + 1 :]


def is_of_aws(request: StoreRequest) -> bool:
    return request.store == (AWS,)


def _request(site: addresses.Site, before: str, path: Parts, buckets: int) -> StoreRequest:
    """``before``: what is put before the host."""
    if _is_number(site.host):
        return StoreRequest(
            (_S3, str(site.port), site.host), _labels(before.removesuffix(".")), path, buckets
        )
    host = before + site.host
    aws = _OF_AWS.fullmatch(host)
    if aws is None:
        return StoreRequest((_S3, str(site.port)), _without_suffix(_labels(host)), path, buckets)
    if aws["bucket"] is not None:
        return StoreRequest((AWS,), (aws["bucket"],), path, 0)
    return StoreRequest((AWS,), path[:1], path[1:], 0)


def _labels(host: str) -> Parts:
    return tuple(reversed(host.split("."))) if host else ()


def _without_suffix(labels: Parts) -> Parts:
    """A Service's name leads to one host with the cluster's suffix and without. Nothing may be left: a bucket may have been
    put before the suffix alone."""
    labels = labels[2:] if labels[:2] == ("local", "cluster") else labels
    return labels[1:] if labels[:1] == ("svc",) else labels


def _is_number(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
