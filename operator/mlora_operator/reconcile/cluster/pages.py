"""Lists of the API server in pages of few bytes, however many objects there are and however large they are.

A page is asked for by a number of objects, which says nothing of its size: one of more than ``PAGE_BYTES`` is given up
while it is read and asked for again with fewer objects. To parse JSON takes several times its bytes.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

PAGE_BYTES = 4 * 2**20
FIRST, MOST = 50, 500  # objects of a page
# Compressed, a few network packets may be hundreds of megabytes.
UNPACKED = {"Accept-Encoding": "identity"}

# Query and the most bytes that it may be answered with (None: one object, which the server bounds); None where it is more.
Ask = Callable[[Mapping[str, str], int | None], Awaitable[bytes | None]]


class Expired(Exception):
    """Listing took so long that the server no longer has the state that the first page was of."""


async def pages(ask: Ask, query: Mapping[str, str]) -> AsyncIterator[dict[str, Any]]:
    """The pages of a list, at least one. Where the state of the first one has expired it begins again, so that objects may
    come twice. Raises what ``ask`` raises."""
    limit, token = FIRST, ""
    while True:
        params = {**query, "limit": str(limit)} | ({"continue": token} if token else {})
        try:
            text = await ask(params, PAGE_BYTES if limit > 1 else None)
        except Expired:
            if not token:
                raise
            token = ""
            continue
        if text is None:
            limit = max(1, limit // 4)
            continue
        if 2 * len(text) <= PAGE_BYTES:
            limit = min(2 * limit, MOST)
        page = dict(json.loads(text))
        del text
        token = (page.get("metadata") or {}).get("continue") or ""
        yield page
        del page  # before the next one is there
        if not token:
            return


async def read_at_most(content: AsyncIterable[bytes], most: int | None) -> bytes | None:
    """All of it; None as soon as it is more than ``most`` bytes."""
    parts, size = [], 0
    async for part in content:
        size += len(part)
        if most is not None and size > most:
            return None
        parts.append(part)
    return b"".join(parts)
