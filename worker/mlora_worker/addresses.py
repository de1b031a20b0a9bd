"""Addresses: one grammar, one parser, one spelling. Pure; the standard library alone.

Two parsers of one text may see two hosts in it: the rule that judges an address and the client that connects to it, the
API server and the worker. So what an address may look like is written once, as patterns that the CRDs, ``mlora validate``
and the worker share (they mean the same to RE2, Rust's and Python's engine), and whatever wants a part of an address asks
this module. What the patterns let through has one reading:

* A host is a DNS name of ASCII labels whose last begins with a letter, so that it is never a number (``127.1``,
  ``0x7f.1``), without a dot at its end; or an IPv4 or IPv6 address as RFC 5952 writes it, and no IPv6 one that stands for
  an IPv4 one. No user, no empty port.
* A path has no empty part, no ``.`` and no ``..``. No backslash, no control character, no white space but a plain blank.
* S3 keys are literal, in ``file`` addresses ``%41`` is ``A``, in web addresses all but RFC 3986's characters is escaped.
* One slash at the end of a folder makes no difference.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv6Address, ip_address
from typing import Final, NamedTuple
from urllib.parse import quote, unquote, urljoin

DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_LONGEST_HOST: Final = 253

_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_LAST = r"[A-Za-z](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
HOST = rf"(?:(?:{_LABEL}\.)*{_LAST}|(?:{_OCTET}\.){{3}}{_OCTET}|\[[0-9a-f:]{{2,39}}\])"
PORT = r"(?:[1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
_SITE = rf"https?://{HOST}(?::{PORT})?"

_DOT, _ESCAPED = r"(?:\.|%2[Ee])", r"%(?:[013-9A-Fa-f][0-9A-Fa-f]|2[0-9A-DFa-df])"  # the second is not a dot
_PLAIN = r"[A-Za-z0-9_~!$&\x27()*+,;=:@-]"
_WEB_PART = rf"(?:(?:{_DOT}*(?:{_PLAIN}|{_ESCAPED}))+{_DOT}*)?"
_WEB = rf"{_SITE}(?:/{_WEB_PART})*"
_QUERY = r"\?(?:[A-Za-z0-9._~!$&\x27()*+,;=:@/?-]|%[0-9A-Fa-f]{2})*"

# Of names: signs that nobody sees, or that turn a text around.
_UNSEEN = "\\x00-\\x1f\\x7f-\\xa0\\xad\u061c\u1680\u180e\u2000-\u200f\u2028-\u202f\u205f-\u206f\u3000\ufeff\ufff9-\ufffc"


def _parts(without: str = "") -> str:
    """Parts of a path, each behind its slash."""
    return rf"(?:/(?:\.*[^./\\{_UNSEEN}{without}])+\.*)*"


def _file_parts(without: str = "") -> str:
    return rf"(?:/(?:{_DOT}*(?:[^./\\?%{_UNSEEN}{without}]|{_ESCAPED}))+{_DOT}*)+"


_BUCKET = r"[a-z0-9](?:[a-z0-9._-]{0,61}[a-z0-9])?"
_OWNER = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}"
_TAG = r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,127}"
_COMMIT = rf"(?:refs/{_TAG}/{_TAG}|{_TAG})"

_SITE_OF_STORE = rf"{_SITE}(?:/(?:\.*[A-Za-z0-9_~-])+\.*)*/?"
_S3 = rf"s3://{_BUCKET}{_parts()}/?"
_FILE = rf"file://{_file_parts()}/?"
_WEB_FILE = rf"{_WEB}(?:{_QUERY})?"
_HUB_DATA = rf"hf://datasets/{_OWNER}/{_OWNER}(?:@{_COMMIT})?{_parts()}/?"
_HUB_MODEL = rf"hf://{_OWNER}/{_OWNER}{_parts('@?#*')}/?"
_FOLDER = rf"s3://{_BUCKET}{_parts('*')}/?|file://{_file_parts('*')}/?"

# The patterns of fields.
ENDPOINT: Final = rf"^{_SITE_OF_STORE}$"
DATA: Final = rf"^(?:{_S3}|{_FILE}|{_WEB_FILE}|{_HUB_DATA})$"
FOLDER: Final = rf"^(?:{_FOLDER})$"
MODEL: Final = rf"^(?:{_FOLDER}|{_WEB}|{_HUB_MODEL})$"
REVISION: Final = rf"^{_TAG}(?:/{_TAG})*$"  # of a hub's repository: a branch, tag or commit
REGION: Final = rf"^{_LABEL}$"  # AWS makes a host of it

_SITE_PARTS = re.compile(rf"(https?)://({HOST})(?::({PORT}))?((?:/[^?]*)?)(?:\?(.*))?", re.DOTALL)
_DATA_PARTS = re.compile(rf"hf://datasets/({_OWNER})/({_OWNER})(?:@({_COMMIT}))?(.*)", re.DOTALL)
_MODEL_PARTS = re.compile(rf"hf://({_OWNER})/({_OWNER})(.*)", re.DOTALL)
_PATH = re.compile(_parts())
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")


class NotAnAddress(ValueError):
    """``str(error)`` says what to write instead."""


@dataclass(frozen=True, slots=True)
class Site:
    """Of an ``http`` or ``https`` address."""

    scheme: str
    host: str  # in lower case; an IPv6 address without brackets
    port: int  # also where the address names none
    path: str  # as it stands there; an endpoint's without a slash at its end
    query: str | None = None

    @property
    def origin(self) -> str:
        """One spelling of scheme, host and port."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}" + (
            "" if self.port == DEFAULT_PORTS[self.scheme] else f":{self.port}"
        )

    @property
    def target(self) -> str:
        """What a request's first line has."""
        return (self.path or "/") + (f"?{self.query}" if self.query is not None else "")


class S3Address(NamedTuple):
    bucket: str
    key: str  # without slashes around it; empty for a whole bucket


class HubAddress(NamedTuple):
    owner: str
    name: str
    revision: str | None
    path: str  # without slashes around it; may be empty, or a pattern


@lru_cache(maxsize=1024)  # a pass of the operator asks for that of every task, and most have the same
def endpoint(text: str) -> Site:
    """Of a store or a hub. Raises NotAnAddress."""
    site = _site(text, _SITE_OF_STORE, "a URL such as https://s3.example.org:9000")
    return Site(site.scheme, site.host, site.port, site.path.rstrip("/"))


def web(text: str) -> Site:
    """Of a file or folder. Raises NotAnAddress."""
    return _site(text, _WEB_FILE, "an address such as https://host/path")


def origin(text: str) -> Site:
    """Scheme, host and port alone, whatever follows them: of a URL that a client has made. Raises NotAnAddress."""
    head = re.split(r"(?<![/:])[/?#]", text, maxsplit=1)[0]
    return _site(head, _SITE, "an address such as https://host/path")


def led_to(at: str, location: str) -> str:
    """Where a server that was asked for ``at`` leads on with a ``location`` (RFC 9110), which may be relative. What may not
    stand in an address is escaped, and a fragment is cut off. Another scheme is left as it is. Raises NotAnAddress.
    """
    here, text = web(at), location.strip(" \t").partition("#")[0]
    scheme = _SCHEME.match(text)
    if scheme is not None and scheme[1].lower() not in DEFAULT_PORTS:
        return text
    if scheme is not None:
        text = scheme[1].lower() + text[scheme.end(1) :]
    elif text.startswith("//"):
        text = f"{here.scheme}:{text}"
    else:
        text = here.origin + urljoin(here.target, text)
    head, mark, query = text.partition("?")
    escaped = quote(head, safe="%/:[]@!$&'()*+,;=~") + mark + quote(query, safe="%/:@!$&'()*+,;=?~")
    web(escaped)
    return escaped


def s3(text: str) -> S3Address:
    """Raises NotAnAddress."""
    _check(text, _S3, "s3://bucket/key")
    bucket, _, key = text.removeprefix("s3://").partition("/")
    return S3Address(bucket, key.removesuffix("/"))


def s3_object(text: str) -> S3Address:
    """The same for an object that a store lists itself, where a key may look like anything. Raises NotAnAddress."""
    bucket, _, key = text.removeprefix("s3://").partition("/")
    if not text.startswith("s3://") or re.fullmatch(_BUCKET, bucket) is None:
        raise _wrong(text, "s3://bucket/key")
    return S3Address(bucket, key)


def file(text: str) -> str:
    """The absolute path. Raises NotAnAddress."""
    _check(text, _FILE, "file:///folder/name with three slashes")
    try:
        path = unquote(text.removeprefix("file://").removesuffix("/"), errors="strict")
    except UnicodeDecodeError:
        path = ""
    if not _PATH.fullmatch(path) or path.count("/") != text.removesuffix("/").count("/") - 2:
        raise _wrong(text, "file:///folder/name")
    return path


def file_object(text: str) -> str:
    """The same for a file that a folder lists itself, where a name may look like anything. Raises NotAnAddress."""
    path = unquote(text.removeprefix("file://"), errors="surrogateescape")
    if not text.startswith("file:///") or "?" in text or "\0" in path:
        raise _wrong(text, "file:///folder/name with three slashes")
    return path


def hub_data(text: str) -> HubAddress:
    """Of a data set. Raises NotAnAddress."""
    _check(text, _HUB_DATA, "hf://datasets/OWNER/NAME or hf://datasets/OWNER/NAME@REVISION/PATH")
    found = _DATA_PARTS.fullmatch(text)
    assert found is not None
    return HubAddress(found[1], found[2], found[3], found[4].strip("/"))


def hub_model(text: str) -> HubAddress:
    """Of a model, or of a folder in its repository. Raises NotAnAddress."""
    _check(text, _HUB_MODEL, "hf://OWNER/NAME, and put a revision into model.revision")
    found = _MODEL_PARTS.fullmatch(text)
    assert found is not None
    return HubAddress(found[1], found[2], None, found[3].strip("/"))


def is_web(text: str) -> bool:
    return text.startswith(("http://", "https://"))


def place(text: str) -> tuple[str, ...]:
    """Scheme and parts of an address of a store or a local disk: equal where, and only where, it is one place there. Raises
    NotAnAddress."""
    if text.startswith("file://"):
        return "file", *file(text).split("/")[1:]
    bucket, key = s3(text)
    return "s3", bucket, *(key.split("/") if key else ())


def _checked(kinds: dict[str, Callable[[str], object]]) -> Callable[[str], str]:
    def checked(text: str) -> str:
        for start, parse in kinds.items():
            if text.startswith(start):
                parse(text)
                return text
        raise _wrong(text, " or ".join(f"{start}..." for start in kinds))

    return checked


# What patterns cannot say, for the types that have them: ``text`` itself. Raise NotAnAddress.
checked_endpoint = _checked({"http://": endpoint, "https://": endpoint})
checked_folder = _checked({"s3://": s3, "file://": file})
checked_data = _checked({"s3://": s3, "file://": file, "hf://": hub_data, "http://": web, "https://": web})
checked_model = _checked({"s3://": s3, "file://": file, "hf://": hub_model, "http://": web, "https://": web})


def _site(text: str, pattern: str, write: str) -> Site:
    _check(text, pattern, write)
    found = _SITE_PARTS.fullmatch(text)
    assert found is not None
    scheme, host, port, path, query = found.groups()
    if len(host) > _LONGEST_HOST or (host.startswith("[") and not _is_canonical(host[1:-1])):
        raise _wrong(text, write)
    return Site(scheme, host.strip("[]").lower(), int(port) if port else DEFAULT_PORTS[scheme], path, query)


def _is_canonical(host: str) -> bool:
    """An IPv6 address in its one spelling, and none that stands for an IPv4 one, which has a spelling of its own."""
    try:
        address = ip_address(host)
    except ValueError:
        return False
    stands_for = isinstance(address, IPv6Address) and (address.ipv4_mapped or 1 < int(address) < 2**32)
    return str(address) == host and not stands_for


def _check(text: str, pattern: str, write: str) -> None:
    if re.fullmatch(pattern, text) is None:
        raise _wrong(text, write)


def _wrong(text: str, write: str) -> NotAnAddress:
    return NotAnAddress(f"{_shown(text)} is not a valid address{_why(text)}: write {write}")


def _shown(text: str) -> str:
    """Without a user and a query, which may be secrets."""
    head, mark, rest = text.partition("://")
    site, slash, path = rest.partition("/")
    if "@" in site or "\\" in site:
        site = "***"
    shown = head + mark + site + slash + path.partition("?")[0]
    return repr(shown if len(shown) <= 200 else f"{shown[:200]}...")


def _why(text: str) -> str:
    rest = text.partition("://")[2]
    site, _, path = rest.partition("/")
    reasons = (
        ("\\" in text, "a backslash"),
        (
            re.search(f"[\\s{_UNSEEN}]", text.replace(" ", "")) is not None,
            "white space or a control character",
        ),
        (is_web(text) and "@" in site, "a user name or a password"),
        (is_web(text) and not rest.isascii(), "a character that is not ASCII"),
        ("//" in path or path.startswith("/"), "an empty segment (//)"),
        (re.search(r"(^|/)(\.|%2[Ee]){1,2}(/|$)", path) is not None, "a segment . or .."),
    )
    found = next((what for wrong, what in reasons if wrong), None)
    return f", since it has {found}" if found is not None else ""
