"""What is judged is what the SDK requests, however a spec spells it."""

from __future__ import annotations

from functools import lru_cache
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mlora_operator.reconcile.state.output_folders import folders, overlap
from mlora_operator.reconcile.state.store_requests import buckets_of, of_s3
from mlora_worker import addresses
from mlora_worker.protocol import Addressing
from mlora_worker.storage.object_store.s3_client import DEFAULT_TIMEOUTS, Keys, S3Options, new_client
from tests.fixtures.stories import stories

Spec = tuple[str | None, Addressing, str]  # endpoint, addressing, uri
AUTO, PATH, VIRTUAL = Addressing.AUTO, Addressing.PATH, Addressing.VIRTUAL


class NotSentError(Exception):
    pass


@lru_cache
def _client(endpoint: str | None, addressing: Addressing) -> tuple[Any, list[str]]:
    """One that sends nothing, and the URLs that it would have requested."""
    asked: list[str] = []
    client = new_client(
        endpoint, "eu-central-1", Keys("a", "b"), DEFAULT_TIMEOUTS, S3Options(addressing=addressing)
    )

    def send(request: Any) -> None:
        asked.append(request.url)
        raise NotSentError

    client._endpoint.http_session.send = send
    return client, asked


def requested(spec: Spec) -> tuple[str, str]:
    """Host with port, and path."""
    endpoint, addressing, uri = spec
    client, asked = _client(endpoint, addressing)
    at = addresses.s3(uri)
    with pytest.raises(NotSentError):
        client.head_object(Bucket=at.bucket, Key=at.key)
    parts = urlsplit(asked[-1])
    return parts.netloc, unquote(parts.path)


def places(spec: Spec) -> Any:
    endpoint, addressing, uri = spec
    return folders(endpoint, uri, addressing)


PORT = 8333
LABELS = st.sampled_from(["abc", "adapters", "svc", "s3x"])
HOSTS = st.lists(LABELS, min_size=1, max_size=4)
NAMES = st.sampled_from(["abc", "adapters", "adapters.abc", "abc.s3x.svc", "s3x"])
PATHS = st.lists(NAMES, min_size=2, max_size=4)


@st.composite
def spelt(draw: st.DrawFn, host: list[str], path: list[str]) -> Spec:
    """A spec whose request has this host and this path."""
    if len(host) > 1 and draw(st.booleans()):
        cut = draw(st.integers(1, len(host) - 1))
        below = path[: draw(st.integers(0, len(path) - 1))]
        endpoint, bucket = host[cut:], ".".join(host[:cut])
        addressing, key = VIRTUAL, path[len(below) :]
    else:
        below = path[: draw(st.integers(0, len(path) - 2))]
        endpoint, bucket = host, path[len(below)]
        addressing, key = draw(st.sampled_from([AUTO, PATH])), path[len(below) + 1 :]
    at = "/".join([f"http://{'.'.join(endpoint)}:{PORT}", *below])
    return at, addressing, "/".join([f"s3://{bucket}", *key])


@settings(max_examples=stories(150), deadline=None)
@given(data=st.data(), host=HOSTS, path=PATHS)
def test_two_specs_with_one_request_have_a_place_in_common(
    data: st.DataObject, host: list[str], path: list[str]
) -> None:
    one, other = data.draw(spelt(host, path)), data.draw(spelt(host, path))
    assert requested(one) == requested(other) == (f"{'.'.join(host)}:{PORT}", "/" + "/".join(path))
    assert overlap(places(one), places(other))


@settings(max_examples=stories(150), deadline=None)
@given(data=st.data(), host=HOSTS, bucket=NAMES, key=PATHS)
def test_an_object_is_one_place_with_its_bucket_in_the_host_and_in_the_path(
    data: st.DataObject, host: list[str], bucket: str, key: list[str]
) -> None:
    """A store may read both, whatever a spec makes them of."""
    one = data.draw(spelt(host, [bucket, *key]))
    other = data.draw(spelt([*bucket.split("."), *host], key))
    assert overlap(places(one), places(other))
    for spec in (one, other):
        read = {found for request in of_s3(*spec) for found in buckets_of(request)}
        assert (bucket, tuple(key)) in read


ENDPOINTS = st.sampled_from(
    [
        None,
        "http://s3.storage:8333",
        "http://10.0.0.1:9000",
        "https://storage",
        "https://s3.eu-central-1.amazonaws.com",
        "https://abc.s3.eu-central-1.amazonaws.com",
        "http://amazonaws.com",
        "https://s3.example.org/storage/v1",
    ]
)
BUCKETS = st.sampled_from(
    ["abc", "ab", "a.b", "a_b", "a..b", "1.2.3.4", "a-.b", "s3.eu-central-1", "abc-s3alias"]
)


@settings(max_examples=stories(150), deadline=None)
@given(endpoint=ENDPOINTS, addressing=st.sampled_from(Addressing), bucket=BUCKETS)
def test_the_request_that_the_sdk_makes_is_one_of_those_that_are_judged(
    endpoint: str | None, addressing: Addressing, bucket: str
) -> None:
    """For every bucket's name: some cannot be part of a host's name, and go into the path whatever the spec says."""
    spec = (endpoint, addressing, f"s3://{bucket}/key/x")
    netloc, path = requested(spec)
    host, _, port = netloc.partition(":")
    assume(path.count("/") > 1)
    at_host, _, key = path.removeprefix("/").partition("/")
    scheme = "http" if endpoint is None else endpoint.partition(":")[0]
    plain = f"{scheme}://{host}" + (f":{port}" if port else "")
    try:
        addresses.endpoint(plain)
    except addresses.NotAnAddress:  # a name before an IP address: nothing resolves it
        return
    assert overlap(folders(plain, f"s3://{at_host}/{key}"), places(spec))


@pytest.mark.parametrize(
    ("story", "spec"),
    [
        ("the SDK's own host", ("https://s3.eu-central-1.amazonaws.com", PATH, "s3://adapters/good/x")),
        ("a host of two stacks", ("https://s3.dualstack.eu-central-1.amazonaws.com", PATH, "s3://adapters/good/x")),
        ("a host of China", ("https://s3.cn-north-1.amazonaws.com.cn", VIRTUAL, "s3://adapters/good/x")),
        ("the bucket's host", ("https://adapters.s3.eu-central-1.amazonaws.com", PATH, "s3://good/x")),
        ("a private endpoint", ("https://bucket.vpce-1a-5e.s3.us-east-1.vpce.amazonaws.com", PATH, "s3://adapters/good/x")),
        ("a part of the host", ("http://amazonaws.com", VIRTUAL, "s3://s3.eu-central-1/adapters/good/x")),
        ("more of the host", ("http://amazonaws.com", VIRTUAL, "s3://adapters.s3.eu-central-1/good/x")),
        ("the bucket in the path", ("https://s3.eu-central-1.amazonaws.com/adapters", PATH, "s3://good/x")),
    ],
)  # fmt: skip
def test_aws_is_one_store(story: str, spec: Spec) -> None:
    assert overlap(places(spec), folders(None, "s3://adapters/good/x")), story
    assert ("adapters", ("good", "x")) in {one for request in of_s3(*spec) for one in buckets_of(request)}


def test_a_bucket_of_aws_is_read_in_one_way() -> None:
    (request,) = of_s3("https://s3.amazonaws.com", PATH, "s3://a.b/adapters/x")
    assert list(buckets_of(request)) == [("a.b", ("adapters", "x"))]
    assert not overlap(folders(None, "s3://a.b/x"), folders(None, "s3://b/a/x"))


@pytest.mark.parametrize("addressing", Addressing)
def test_two_folders_of_one_bucket_are_two_places(addressing: Addressing) -> None:
    endpoint = "http://s3.storage:8333"
    assert not overlap(
        folders(endpoint, "s3://abc/x", addressing), folders(endpoint, "s3://abc/y", addressing)
    )


def test_a_store_below_a_path_is_no_other_store_below_it() -> None:
    one, other = "https://s3.example.org/storage/v1", "https://s3.example.org/storage/v2"
    assert not overlap(folders(one, "s3://abc/x"), folders(other, "s3://abc/x"))
