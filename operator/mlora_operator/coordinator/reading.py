"""HTTP with somebody who may mean harm: nothing is followed, nothing is unpacked, nothing is read beyond a bound.

A worker that was taken over answers as it likes. So its answers are counted while they are read, asked for and taken only
as they are (204 kB of gzip may be 200 MiB), and looked at before they become objects: a parser makes a hundred bytes of
each two that say ``{}``. Nor is it sent anything elsewhere: a request to it carries keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import aiohttp
from pydantic import ValidationError
from pydantic_core import from_json

from mlora_worker.protocol import Message

AnyMessage = TypeVar("AnyMessage", bound=Message)
_PARTS_SHOWN = 8  # of a field's path
_WORDS = 500  # characters of what is wrong
# Whatever the session would add by itself; a coordinator compresses nothing.
KEPT_SECONDS = 50.0  # of a connection that is not in use; coordinators keep theirs for longer
PLAIN = {"Accept-Encoding": "identity"}


class Unbounded(ValueError):
    """``str(error)`` says what of the answer is beyond its bound."""


@dataclass(frozen=True, slots=True)
class AnswerBound:
    """The most that an answer may be. ``values`` and ``containers`` are of JSON, where a key counts as a value."""

    size: int  # bytes
    values: int = 2**19
    containers: int = 2**17  # lists and mappings


def open_session() -> aiohttp.ClientSession:
    """For coordinators. It keeps no cookies, and no names: a pod that comes back has another address under the same one. A
    connection is used again while it lasts, since a handshake costs more than a question, and ends with its pod; there may
    be any number, since every pipeline has one on which the operator waits for news."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(use_dns_cache=False, limit=0, keepalive_timeout=KEPT_SECONDS),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        trust_env=False,
    )


async def read(answer: aiohttp.ClientResponse, most: int) -> bytes:
    """The body, of at most so many bytes. Raises Unbounded once it is known to have more."""
    encoding = answer.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise Unbounded(f"its body is in the encoding {encoding[:40]!r}, which was not requested")
    body = bytearray()
    async for part in answer.content.iter_chunked(65_536):
        if len(body) + len(part) > most:
            raise Unbounded(f"its body has more than {most} bytes")
        body += part
    return bytes(body)


async def beginning(answer: aiohttp.ClientResponse, most: int) -> str:
    """As much of the body as is shown to people, on one line, whatever it is."""
    text = (await answer.content.read(most)).decode("utf-8", "replace")
    return "".join(one if one.isprintable() else " " for one in text).strip()


def understand(model: type[AnyMessage], body: bytes, bound: AnswerBound) -> AnyMessage:
    """The message in ``body``; fields that it does not know are left out, since workers may be newer. Raises Unbounded, or
    ValueError in words.

    By way of plain objects: pydantic's own reader of JSON copies what is wrong into each error, which made 360 MiB of
    1.6 MiB.
    """
    _check(body, bound)
    try:
        return model.model_validate(from_json(body, allow_inf_nan=False), extra="ignore")
    except ValidationError as error:
        raise ValueError(_first(error)) from None


def _first(error: ValidationError) -> str:
    """Field and words of the first problem."""
    problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
    field = ".".join(map(str, problem["loc"][:_PARTS_SHOWN]))
    return f"{field}: {problem['msg']}"[:_WORDS].removeprefix(": ")


def _check(body: bytes, bound: AnswerBound) -> None:
    """Raises Unbounded for JSON of so many values that objects of them would fill the memory. An upper bound: what stands
    in texts counts, too."""
    containers = body.count(b"{") + body.count(b"[")
    if containers > bound.containers:
        raise Unbounded(f"its body has more than {bound.containers} lists and mappings")
    if containers + body.count(b",") > bound.values:
        raise Unbounded(f"its body has more than {bound.values} values")
