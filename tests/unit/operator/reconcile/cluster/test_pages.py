"""Lists in pages of few bytes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping

import pytest

from mlora_operator.reconcile.cluster import pages as module
from mlora_operator.reconcile.cluster.pages import FIRST, MOST, PAGE_BYTES, Expired, pages, read_at_most


class Server:
    """Has objects of these sizes. At the requests of ``expired`` (from 0) it has forgotten the list's state."""

    def __init__(self, sizes: list[int], expired: tuple[int, ...] = ()) -> None:
        self.sizes, self.expired = sizes, expired
        self.limits: list[int] = []

    async def ask(self, params: Mapping[str, str], most: int | None) -> bytes | None:
        assert params["labelSelector"] == "a=b"
        self.limits.append(int(params["limit"]))
        if len(self.limits) - 1 in self.expired:
            raise Expired
        begin = int(params.get("continue", 0))
        sizes = self.sizes[begin : begin + int(params["limit"])]
        if most is not None and sum(sizes) > most:
            return None
        end = begin + len(sizes)
        meta = {"continue": str(end)} if end < len(self.sizes) else {}
        items = [{"at": begin + number, "x": "x" * size} for number, size in enumerate(sizes)]
        return json.dumps({"metadata": meta, "items": items or None}).encode()

    async def all(self) -> list[int]:
        query = {"labelSelector": "a=b"}
        return [one["at"] async for page in pages(self.ask, query) for one in page["items"] or ()]


async def test_small_objects_take_few_requests() -> None:
    server = Server([2000] * 3000)
    assert await server.all() == list(range(3000))
    assert server.limits == [FIRST, 100, 200, 400, *[MOST] * 5]


async def test_no_page_has_more_bytes_than_one_or_the_largest_object() -> None:
    sizes = [100] * 300 + [1_400_000] * 30 + [9_000_000] * 2 + [100] * 300
    server = Server(sizes)
    assert await server.all() == list(range(len(sizes)))
    assert len(server.limits) < 60


async def test_an_empty_list_is_one_page() -> None:
    assert await Server([]).all() == []


async def test_a_list_whose_state_has_expired_begins_again() -> None:
    server = Server([10] * 120, expired=(1,))
    assert set(await server.all()) == set(range(120))
    with pytest.raises(Expired):
        await Server([10], expired=(0,)).all()


async def test_what_is_too_long_is_not_read_to_its_end() -> None:
    read = []

    async def endless() -> AsyncIterator[bytes]:
        while True:
            read.append(1)
            yield b"x" * 2**16

    assert await read_at_most(endless(), PAGE_BYTES) is None
    assert len(read) == PAGE_BYTES // 2**16 + 1
    assert module.UNPACKED == {"Accept-Encoding": "identity"}
