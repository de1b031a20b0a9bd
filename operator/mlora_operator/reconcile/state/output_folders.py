"""Where addresses lead, as far as that can be read off them: one store under two host names is two stores here. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache

from mlora_operator.api.meta import Storage
from mlora_operator.reconcile.state import store_requests
from mlora_operator.reconcile.state.snapshot import Task
from mlora_worker import addresses
from mlora_worker.protocol import Addressing

Folder = tuple[str, ...]  # the store, the parts of its host's name, then the parts of the path
Folders = tuple[Folder, ...]  # of one address: all that its request may mean


@lru_cache(maxsize=50_000)
def folders(endpoint: str | None, uri: str, addressing: Addressing = Addressing.AUTO) -> Folders:
    """Where ``uri`` leads: the request that is made for it (``store_requests``), with the parts of the host's name as
    folders above those of the path, so that a bucket is one folder wherever it stands. Whether a path's first part is a
    bucket ``a.b``, which a host's name has as ``b``, ``a``, cannot be seen: then there is a folder for both. So equal
    requests have a folder in common; a bucket ``a.b`` and the folder ``a`` in bucket ``b`` may pass for one place.

    The same for endpoints that differ in the case of the host, in a port that is the scheme's own anyway, and in the
    cluster's suffix of a Service's name; and for all of AWS, whose buckets have one name each. Of hubs, each address is a
    place of its own: nothing is written there.
    """
    if uri.startswith("file://"):
        return (addresses.place(uri),)
    if uri.startswith("s3://"):
        made = store_requests.of_s3(endpoint, addressing, uri)
    elif addresses.is_web(uri):
        made = (store_requests.of_web(uri),)
    else:
        return (("elsewhere", uri),)
    return tuple(dict.fromkeys(one for request in made for one in _readings(request)))


def _readings(request: store_requests.StoreRequest) -> Iterator[Folder]:
    store, host, path, buckets = request
    yield (*store, *host, *path)
    if buckets and path and "." in path[0]:
        yield (*store, *host, *reversed(path[0].split(".")), *path[1:])


def overlap(some: Iterable[Folder], others: Folders) -> bool:
    """Equal, or one lies in the other."""
    return any(inside((one,), (other,)) or inside((other,), (one,)) for one in some for other in others)


def inside(places: Iterable[Folder], others: Folders) -> bool:
    """A place is one of the others, or lies in it."""
    return any(one[: len(other)] == other for one in places for other in others)


def folders_in(storage: Storage, uri: str) -> Folders:
    return folders(storage.endpoint, uri, storage.addressing)


def outputs_of(task: Task) -> Folders:
    assert task.spec is not None
    return folders_in(task.spec.storage, task.spec.output.uri)


def levels_of(task: Task) -> int:
    """How many folders its output's path has, the bucket and those of the endpoint with them."""
    assert task.spec is not None
    endpoint, place = task.spec.storage.endpoint, addresses.place(task.spec.output.uri)
    below = addresses.endpoint(endpoint).path.count("/") if endpoint is not None and place[0] == "s3" else 0
    return below + len(place) - 1


def buckets_of(task: Task, known: frozenset[str]) -> Iterator[tuple[str, ...]]:
    """Where its output lies as ``addresses.place`` writes it, and every other place in one of the ``known`` buckets that a
    store may take for it.
    """
    assert task.spec is not None
    storage, uri = task.spec.storage, task.spec.output.uri
    if not uri.startswith("s3://"):
        yield addresses.place(uri)
        return
    written = addresses.place(uri)
    yield written
    for request in store_requests.of_s3(storage.endpoint, storage.addressing, uri):
        for bucket, key in store_requests.buckets_of(request):
            if bucket in known and ("s3", bucket, *key) != written:
                yield ("s3", bucket, *key)


def is_whole_bucket(task: Task) -> bool:
    """Its output names no prefix in its bucket: whoever had it would have all that lies there."""
    assert task.spec is not None
    storage, uri = task.spec.storage, task.spec.output.uri
    if not uri.startswith("s3://"):
        return False
    made = store_requests.of_s3(storage.endpoint, storage.addressing, uri)
    return not addresses.s3(uri).key or any(store_requests.is_of_aws(one) and not one.path for one in made)


def may_be_whole_bucket(task: Task) -> bool:
    """Its output's one folder is a bucket to a store that reads the bucket from the path, and goes by the host's name that
    the request has."""
    assert task.spec is not None
    storage, uri = task.spec.storage, task.spec.output.uri
    if not uri.startswith("s3://"):
        return False
    made = store_requests.of_s3(storage.endpoint, storage.addressing, uri)
    return any(not store_requests.is_of_aws(one) and len(one.path) <= 1 for one in made)
