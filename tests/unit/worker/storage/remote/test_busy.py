"""How long a busy server asks to be left alone, in every way in which it may say so."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from mlora_worker.storage.busy import asked_seconds, busy

NOON = datetime(2026, 11, 28, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "200"}, 200),
        ({"Retry-After": "0"}, 0),
        ({"Retry-After": "9" * 400}, 86_400),
        ({"Retry-After": "soon"}, None),
        ({"Retry-After": "-5"}, None),
        ({"Retry-After": "Sat, 28 Nov 2026 12:03:20 GMT"}, 200),
        ({"Retry-After": "Sat, 28 Nov 2026 12:03:20 GMT", "Date": "Sat, 28 Nov 2026 12:03:00 GMT"}, 20),
        ({"Retry-After": "Sat, 28 Nov 2026 11:00:00 GMT"}, 0),
        ({"Retry-After": "Sat, 28 Nov 2026 12:03:20"}, 200),
        ({"RateLimit": '"api";r=0;t=200'}, 200),
        ({"RateLimit": '"api";r=3;t=9, "pages";r=0;t=200, "resolvers";t=1;r=0'}, 200),
        ({"RateLimit": "limit=100, remaining=0, reset=200"}, 200),
        ({"RateLimit": '"api";r=3;t=9'}, 9),
        ({"RateLimit": '"api";r=0'}, None),
        ({"RateLimit": "x" * 100_000}, None),
        ({"RateLimit-Reset": "200"}, 200),
        ({"X-RateLimit-Reset": str(int(NOON.timestamp()) + 200)}, 200),
        ({"Retry-After": "7", "RateLimit": '"api";r=0;t=200'}, 7),
        ({"Retry-After": "later", "RateLimit": '"api";r=0;t=200'}, 200),
    ],
)
def test_what_a_header_says(headers: dict[str, str], seconds: float | None) -> None:
    assert asked_seconds(headers, NOON) == seconds


def test_the_error_says_until_when() -> None:
    found = busy("cannot read x: the server answered 429", 200.0, NOON)
    assert str(found) == (
        "cannot read x: the server answered 429: it requests a pause of 200 s, so the request is retried at "
        "2026-11-28 12:03:20 UTC"
    )
    assert (busy("x", None, NOON).seconds, busy("x", 0.0, NOON).seconds) == (30.0, 1.0)
