"""One request to a server of models: bounded in time and size, tried again where that may help, errors in one line."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import HTTPRedirectHandler, OpenerDirector, ProxyHandler, Request, build_opener

LARGEST_ANSWER = 16 * 2**20  # bytes
TRIES = 4  # of one request in one pass
_LONGEST_WORDS = 500  # characters of an answer in a message
_NOT_NOW = {408, 429, 502, 503, 504}
_PIECE = 1 << 16


class ServerError(Exception):
    """Root of both kinds below."""


class ServerSilent(ServerError):
    """The server does not answer, or says that it cannot just now."""


class ServerRefused(ServerError):
    """The server answers that it will not. ``status`` is HTTP's."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class _NoRedirects(HTTPRedirectHandler):
    """A server that sends its key's bearer elsewhere is not followed there."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def _opener() -> OpenerDirector:
    return build_opener(ProxyHandler({}), _NoRedirects())


@dataclass(frozen=True)
class ServerConnection:
    """``url`` without a path at its end; ``key`` is sent as a bearer token."""

    url: str
    key: str | None = None
    pause: Callable[[float], None] = time.sleep
    now: Callable[[], float] = time.monotonic

    def get(self, path: str, seconds: float) -> Any:
        """What the JSON of the answer says. Raises ServerSilent, ServerRefused."""
        return self._insist("GET", path, None, seconds)

    def post(self, path: str, body: dict[str, Any], seconds: float) -> Any:
        """As ``get``; an answer that is no JSON is its text."""
        return self._insist("POST", path, json.dumps(body).encode(), seconds)

    def _insist(self, method: str, path: str, body: bytes | None, seconds: float) -> Any:
        for attempt in range(1, TRIES):
            try:
                return self._ask(method, path, body, seconds)
            except ServerSilent:
                self.pause(2.0 ** (attempt - 1))
        return self._ask(method, path, body, seconds)

    def _ask(self, method: str, path: str, body: bytes | None, seconds: float) -> Any:
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        request = Request(self.url + path, data=body, headers=headers, method=method)
        end = self.now() + seconds
        try:
            with _opener().open(request, timeout=seconds) as answer:
                return _parsed(self._read(answer, end))
        except HTTPError as error:
            words = _words(self._read_quietly(error, end)) or error.reason
            message = f"{self.url}{path} answered {error.code}: {words}"
            if error.code in _NOT_NOW:
                raise ServerSilent(message) from error
            raise ServerRefused(message, error.code) from error
        except (URLError, OSError, HTTPException, UnicodeError) as error:
            reason = getattr(error, "reason", None) or error
            raise ServerSilent(f"{self.url} does not answer: {reason or type(error).__name__}") from error

    def _read(self, answer: HTTPResponse | HTTPError, end: float) -> bytes:
        content = bytearray()
        while piece := answer.read1(_PIECE):
            content += piece
            if len(content) > LARGEST_ANSWER:
                raise ServerRefused(f"{self.url} answers with more than {LARGEST_ANSWER:,} bytes")
            if self.now() > end:
                raise TimeoutError("the answer takes too long")
        return bytes(content)

    def _read_quietly(self, error: HTTPError, end: float) -> bytes:
        try:
            return self._read(error, end)
        except (OSError, HTTPException, ServerError):
            return b""


def _parsed(content: bytes) -> Any:
    text = content.decode(errors="replace")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _words(content: bytes) -> str:
    """What an error's answer says, whichever server wrote it."""
    parsed = _parsed(content)
    for field in ("error", "message", "error_message", "detail"):
        if isinstance(parsed, dict) and parsed.get(field):
            parsed = parsed[field]
    return str(parsed)[:_LONGEST_WORDS].strip()
