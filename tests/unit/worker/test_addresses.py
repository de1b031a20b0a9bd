"""One parser: what the schema lets through is read in the same way by whoever judges, writes, compares and connects."""

from __future__ import annotations

import functools
import re
import socket
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import pytest
import urllib3
import urllib3.util
import yarl
from botocore.httpsession import URLLib3Session
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import Field, TypeAdapter, ValidationError

from mlora_operator.download.source import _folder_of
from mlora_operator.reconcile.state.output_folders import folders
from mlora_worker import addresses
from mlora_worker.addresses import NotAnAddress, S3Address
from mlora_worker.protocol import DatasetUri, EndpointUrl, FolderUri, ModelUri
from mlora_worker.storage.uri import file_path, s3_address
from tests.fixtures.stories import stories

TYPES: dict[str, TypeAdapter[str]] = {
    "endpoint": TypeAdapter(EndpointUrl),
    "data": TypeAdapter(DatasetUri),
    "model": TypeAdapter(ModelUri),
    "folder": TypeAdapter(FolderUri),
}
GOOD = [
    "http://s3.storage:8333",
    "https://s3.example.org/gateway/",
    "http://127.0.0.1:9000/a/b",
    "http://[fd12::1]:80",
    "https://host.example/a%20b/c.jsonl?X=1&Y=%2F",
    "s3://bucket/a/b c/100%.jsonl",
    "s3://bucket/a/**/*.jsonl",
    "file:///data/a%20b/rows.jsonl",
    "hf://datasets/owner/name@refs/convert/parquet/default/*.parquet",
    "hf://owner/name/folder",
]
# What some parser takes for a border, a dot, a digit or nothing at all.
ODD = [
    *"\\@/:?#[]%.*~ \t\n\r\0\x0b\x7f\x85\xa0",
    "//", "/../", "/./", "%2e", "%2F", "%00", "%5c", "\\@", "@127.0.0.1", ":80@", "127.1", "0x7f.1", "2130706433",
    "[::ffff:127.0.0.1]", "[::1]", "::ffff:7f00:1", "\u3002", "\uff0e", "\u2100", "\u24b6", "\u200b", "\u00ad", "\ufeff",
    "localhost", "xn--", ".", "-", "_",
]  # fmt: skip


@st.composite
def hostile(draw: st.DrawFn) -> str:
    text = draw(st.sampled_from(GOOD))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(text)))
        cut = draw(st.integers(0, 3))
        text = text[:at] + draw(st.sampled_from(ODD)) + text[at + cut :]
    return text


def accepted(kind: str, text: str) -> bool:
    try:
        TYPES[kind].validate_python(text)
    except ValidationError:
        return False
    return True


@functools.cache
def botocores_session() -> Any:
    """Made once: it reads the certificates of a hundred authorities."""
    return URLLib3Session()


def sites() -> st.SearchStrategy[str]:
    return st.one_of(hostile(), st.from_regex(re.compile(addresses.ENDPOINT, re.ASCII)))


@settings(max_examples=stories(300), deadline=None)
@given(text=sites())
@example("http://127.0.0.1:80\\@s3.example.org")
@example("http://s3.example.org\\@127.0.0.1")
@example("http://a@b@127.0.0.1")
@example("http://127.0.0.1\t.example.org")
@example("http://s3.example.org#@127.0.0.1")
@example("http://\u24e23.example.org")
def test_the_host_that_is_judged_is_the_host_that_clients_connect_to(text: str) -> None:
    kinds = [kind for kind in ("endpoint", "data", "model") if accepted(kind, text)]
    if not kinds or not addresses.is_web(text):
        return
    site = addresses.web(text)
    judged = (site.scheme, site.host, site.port)
    split, parsed, of_aiohttp = urlsplit(text), urllib3.util.parse_url(text), yarl.URL(text)
    assert judged == (split.scheme, split.hostname, split.port or addresses.DEFAULT_PORTS[split.scheme])
    assert judged == (
        parsed.scheme,
        (parsed.host or "").strip("[]"),
        parsed.port or addresses.DEFAULT_PORTS[parsed.scheme or ""],
    )
    assert judged == (of_aiohttp.scheme, of_aiohttp.raw_host, of_aiohttp.port)
    with urllib3.PoolManager() as pools:
        pool = pools.connection_from_url(text)
        assert judged == (pool.scheme, pool.host.strip("[]"), pool.port)
    of_botocore = botocores_session()._get_connection_manager(text).connection_from_url(text)
    assert judged == (of_botocore.scheme, of_botocore.host.strip("[]"), of_botocore.port)
    assert split.username is None
    assert parsed.auth is None
    assert site.target == (split.path or "/") + (f"?{split.query}" if "?" in text else "")


@settings(max_examples=stories(300), deadline=None)
@given(text=sites())
def test_a_host_is_an_address_in_one_spelling_or_a_name_that_no_resolver_takes_for_a_number(
    text: str,
) -> None:
    if not accepted("endpoint", text):
        return
    host = addresses.endpoint(text).host
    try:
        address = ip_address(host)
    except ValueError:
        with pytest.raises(OSError):
            socket.inet_aton(host)
        assert host.isascii()
        assert not host.endswith(".")
    else:
        assert str(address) == host


@settings(max_examples=stories(300), deadline=None)
@given(text=hostile())
def test_what_a_pattern_lets_through_is_read(text: str) -> None:
    """But for what it cannot say: IPv6 addresses in another spelling, names that are too long, escapes that are no text."""
    patterns = {
        "endpoint": addresses.ENDPOINT, "data": addresses.DATA, "model": addresses.MODEL, "folder": addresses.FOLDER,
    }  # fmt: skip
    for kind, pattern in patterns.items():
        matched = TypeAdapter(Annotated[str, Field(pattern=pattern)])
        try:
            matched.validate_python(text)
        except ValidationError:
            assert not accepted(kind, text)
            continue
        assert accepted(kind, text) or "[" in text or "%" in text


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("http://127.0.0.1:80\\@s3.example.org", "a backslash"),
        ("http://user:secret@s3.example.org/a", "a user name or a password"),
        ("http://s3.example.org/a b", "RFC 3986"),
        ("s3://bucket/a\tb", "white space or a control character"),
        ("http://s3\u3002example.org", "a character that is not ASCII"),
        ("s3://bucket/a//b", r"an empty segment \(//\)"),
        ("s3://bucket/a/../b", r"a segment \. or \.\."),
        ("file:///a/%2E%2e/b", r"a segment \. or \.\."),
    ],
)
def test_it_says_what_is_wrong_and_never_a_password(wrong: str, why: str) -> None:
    with pytest.raises(NotAnAddress) as caught:
        addresses.checked_data(wrong)
    told = str(caught.value)
    if why != "RFC 3986":
        assert re.search(f"since it has {why}: write ", told)
    assert "secret" not in told


@pytest.mark.parametrize(
    "text",
    [
        "http://127.1", "http://0x7f.1", "http://0177.0.0.1", "http://2130706433", "http://017700000001", "http://1.2.3",
        "http://1.2.3.4.5", "http://01.2.3.4", "http://256.1.1.1", "http://a.1", "http://a.0x7f", "http://a.", "http://.a",
        "http://a..b", "http://-a", "http://a-", "http://a_b", "http://[::ffff:127.0.0.1]", "http://[::ffff:7f00:1]",
        "http://[0::1]", "http://[::0001]", "http://[FE80::1]", "http://[fe80::1%25eth0]", "http://[::7f00:1]", "http://[::1",
        "http://::1", "http://[]", "http://a:", "http://a:0", "http://a:00080", "http://a:65536", "http://a:8o", "http://a:-1",
        "http://a:80:80", "http://", "http:///a", "http:a", "HTTP://a", "http://a/%", "http://a/%zz", "http://a/%2e%2E/b",
        "http://a/.", "http://a/..", "http://a#b", "http://a?b=c d", "ftp://a", "//a", "",
        "http://" + "a" * 64, "http://" + ".".join(["a" * 60] * 5),
    ],
)  # fmt: skip
def test_no_odd_address_of_the_web_is_one(text: str) -> None:
    assert not accepted("endpoint", text)
    assert not accepted("data", text)
    assert not accepted("model", text)


@pytest.mark.parametrize(
    "text",
    [
        "s3://", "s3:///a", "s3://B/a", "s3://a_/b", "s3://-a/b", "s3://" + "a" * 64, "s3://a@b/c", "s3://a:80/b", "s3://a//b",
        "s3://a/b//", "s3://a//", "s3://a/./b", "s3://a/..", "s3://a/b\\c", "s3://a/b\nc", "s3://a/b\x00", "s3://a/b\u2028",
        "s3://a/b\u202ec", "s3://a/b\u200b", "s3://a?b", "s3://a#b", "S3://a/b",
        "file://a/b", "file:///", "file:/a", "file:///a//b", "file:///a/../b", "file:///a/%2e%2e/b", "file:///a%2fb",
        "file:///a%00", "file:///a%0ab", "file:///a%ff", "file:///a%", "file:///a?b", "file:///a\\b", "file:///a%5cb",
        "file://localhost/a",
    ],
)  # fmt: skip
def test_no_odd_address_of_a_store_is_one(text: str) -> None:
    assert not accepted("data", text)
    assert not accepted("folder", text)
    assert not accepted("model", text)


@pytest.mark.parametrize(
    "text",
    [
        "hf://datasets/../name", "hf://datasets/owner/..", "hf://datasets/owner/.", "hf://datasets/owner/name@..",
        "hf://datasets/owner/name@refs/../x", "hf://datasets/owner/name/../x",
        "hf://datasets/owner/name//x", "hf://datasets/owner", "hf://datasets/o?a/name", "hf://datasets/owner/name@v1/\\x",
        "hf://../name", "hf://owner/..", "hf://owner", "hf://owner/name@v1", "hf://owner/name/../x", "hf://owner/name/*",
        "hf://owner/name/a?b",
    ],
)  # fmt: skip
def test_no_odd_address_of_a_hub_is_one(text: str) -> None:
    assert not accepted("data", text)
    assert text.startswith("hf://datasets") or not accepted("model", text)


NAMES = st.text(st.characters(codec="utf-8", exclude_characters="/"), min_size=1, max_size=6)


@settings(max_examples=stories(400))
@given(parts=st.lists(NAMES, min_size=1, max_size=3), slash=st.sampled_from(["", "/"]))
def test_a_folder_of_a_store_is_written_read_and_compared_as_one_place(parts: list[str], slash: str) -> None:
    text = f"s3://bucket/{'/'.join(parts)}{slash}"
    if not accepted("folder", text):
        return
    assert addresses.s3(text) == S3Address("bucket", "/".join(parts))
    assert s3_address(text) == S3Address("bucket", "/".join(parts) + slash), "what the store is asked for"
    assert folders(None, text) == (("aws", "bucket", *parts),), "what is compared"


@settings(max_examples=stories(400))
@given(parts=st.lists(NAMES, min_size=1, max_size=3))
def test_a_file_is_written_read_and_compared_as_one_place(parts: list[str]) -> None:
    plain, escaped = f"file:///{'/'.join(parts)}", ""
    if "\0" not in plain:
        escaped = Path("/", *parts).as_uri()
    for text in (plain, escaped):
        if not accepted("folder", text):
            continue
        path = file_path(text)
        assert Path(addresses.file(text)) == path == _folder_of(text)
        assert folders(None, text) == (("file", *path.parts[1:]),)
        assert text == plain or path == Path("/", *parts)


@pytest.mark.parametrize(
    ("parse", "text", "parts"),
    [
        (addresses.hub_data, "hf://datasets/o/n", ("o", "n", None, "")),
        (addresses.hub_data, "hf://datasets/o/n@v1.0/a/*.jsonl", ("o", "n", "v1.0", "a/*.jsonl")),
        (
            addresses.hub_data,
            "hf://datasets/o/n@refs/convert/parquet/a/",
            ("o", "n", "refs/convert/parquet", "a"),
        ),
        (addresses.hub_data, "hf://datasets/o/n/a@b", ("o", "n", None, "a@b")),
        (addresses.hub_model, "hf://o/n/folder", ("o", "n", None, "folder")),
        (addresses.s3, "s3://b", ("b", "")),
        (addresses.s3, "s3://b/", ("b", "")),
        (addresses.s3, "s3://b/a b/100%?x#y/", ("b", "a b/100%?x#y")),
    ],
)
def test_its_parts(parse: Callable[[str], Any], text: str, parts: tuple[str | None, ...]) -> None:
    assert tuple(parse(text)) == parts


def test_one_spelling_of_a_site() -> None:
    spellings = ("http://S3.Storage:80/a/", "http://s3.storage/a", "http://s3.storage:80/a")
    assert len({(site.origin, site.path) for site in map(addresses.endpoint, spellings)}) == 1
    assert addresses.endpoint("http://[fd12::1]:9000").origin == "http://[fd12::1]:9000"


@pytest.mark.parametrize(
    ("location", "leads_to"),
    [
        ("https://cdn.example/a?X-Sig=%2F&e=1", "https://cdn.example/a?X-Sig=%2F&e=1"),
        ("HTTPS://cdn.example/a#part", "https://cdn.example/a"),
        ("//cdn.example/a", "https://cdn.example/a"),
        ("/c/ä b", "https://host.example:8443/c/%C3%A4%20b"),
        ("../c", "https://host.example:8443/c"),
        ("?page=[2]", "https://host.example:8443/a/b?page=%5B2%5D"),
        ("ftp://host/x", "ftp://host/x"),
    ],
)
def test_a_server_leads_on_by_the_same_grammar(location: str, leads_to: str) -> None:
    assert addresses.led_to("https://HOST.example:8443/a/b", location) == leads_to


@pytest.mark.parametrize(
    "location",
    [
        "http://127.0.0.1:80\\@host.example/",
        "//127.0.0.1\\@host.example/",
        "http://user:secret@host.example/",
        "http://0x7f.1/",
        "http://127.1/",
        "http://2130706433/",
        "http://host.example./",
        "http://[::ffff:127.0.0.1]/",
        "http://[::1",
        "http://host.example:99999/",
        "http:///x",
        "http:x",
        "/%2e%2e/x",
    ],
)
def test_where_two_parsers_would_see_two_hosts_nobody_is_led(location: str) -> None:
    with pytest.raises(addresses.NotAnAddress):
        addresses.led_to("http://host.example/a/b", location)


@pytest.mark.parametrize(
    ("url", "host", "port"),
    [
        ("https://bucket.s3.example/a%2Fb//c?x=/", "bucket.s3.example", 443),
        ("http://[::1]:9000?list-type=2", "::1", 9000),
    ],
)
def test_of_a_url_that_a_client_has_made_the_host_is_taken_alone(url: str, host: str, port: int) -> None:
    site = addresses.origin(url)
    assert (site.host, site.port, site.path) == (host, port, "")
