"""A coordinator that was taken over: where it leads is not followed, what it packs is not unpacked, what has no end is not
read to its end, and its link goes on asking."""

from __future__ import annotations

import asyncio
import gzip
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from mlora_operator.coordinator import CoordinatorClient, Invalid, Links, Unreachable, client, open_session
from mlora_operator.reconcile.ports import Endpoint
from mlora_operator.reconcile.state.snapshot import Key
from mlora_worker.protocol import Dataset, LoRAConfig, Plan, Report, StorageAccess, TaskPlan, Training

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
TOY = Key("team-a", "toy")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
GOOD = Report(run_id="run-1", sequence=1, plan_generation=0, ready=True)


class Hostile:
    """A server whose every answer is what the test says; remembers who asked for what."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, str]] = []
        self.cookies: list[str | None] = []
        self.accepts: list[str | None] = []
        self.answer: Handler = self.good

    async def good(self, _: web.Request) -> web.StreamResponse:
        return web.Response(text=GOOD.to_json(), content_type="application/json")

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append((request.method, request.path, await request.text()))
        self.cookies.append(request.headers.get("Cookie"))
        self.accepts.append(request.headers.get("Accept-Encoding"))
        return await self.answer(request)


@pytest.fixture
async def hostile() -> Hostile:
    return Hostile()


async def _serve(hostile: Hostile) -> TestServer:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", hostile.handle)
    server = TestServer(app)
    await server.start_server()
    return server


@pytest.fixture
async def server(hostile: Hostile) -> AsyncIterator[TestServer]:
    server = await _serve(hostile)
    yield server
    await server.close()


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with open_session() as session:
        yield session


@pytest.fixture
def coordinator(server: TestServer, session: aiohttp.ClientSession) -> CoordinatorClient:
    return CoordinatorClient(session, Endpoint(str(server.make_url("")), "hush"))


def plan() -> Plan:
    task = TaskPlan(
        uid="u",
        namespace="team-a",
        name="one",
        base_model="toy",
        lora=LoRAConfig(),
        dataset=Dataset(inline="x"),
        training=Training(),
        output_uri="s3://adapters/one",
        storage=StorageAccess(access_key="id", secret_key="very secret"),
    )
    return Plan(generation=1, tasks=(task,))


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308, 304, 399])
async def test_nothing_follows_where_an_answer_leads(
    hostile: Hostile, coordinator: CoordinatorClient, status: int
) -> None:
    elsewhere = Hostile()
    other = await _serve(elsewhere)

    async def lead(request: web.Request) -> web.StreamResponse:
        return web.Response(status=status, headers={"Location": str(other.make_url(request.path))})

    hostile.answer = lead
    try:
        with pytest.raises(Invalid, match="is not followed"):
            await coordinator.put_plan(plan())
        with pytest.raises(Invalid, match="is not followed"):
            await coordinator.poll_report()
        with pytest.raises(Invalid, match="is not followed"):
            await coordinator.get_timeline(2)
        assert elsewhere.asked == []
    finally:
        await other.close()


async def test_nothing_is_unpacked(hostile: Hostile, coordinator: CoordinatorClient) -> None:
    """204 kB that are 200 MiB: neither does the memory grow, nor does it take long."""
    packed = gzip.compress(b" " * (200 * 2**20), compresslevel=6)
    assert len(packed) < 300_000

    async def bomb(_: web.Request) -> web.StreamResponse:
        return web.Response(body=packed, headers={"Content-Encoding": "gzip"})

    hostile.answer = bomb
    tracemalloc.start()
    try:
        with pytest.raises(Invalid, match="gzip"):
            await coordinator.poll_report()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 * 2**20
    assert hostile.accepts == ["identity"]


@pytest.mark.parametrize("status", [200, 500])
async def test_a_body_without_an_end_is_left(
    hostile: Hostile, coordinator: CoordinatorClient, status: int
) -> None:
    sent = 0

    async def endless(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        answer = web.StreamResponse(status=status)
        await answer.prepare(request)
        while True:
            await answer.write(b" " * 2**20)
            sent += 2**20
        return answer

    hostile.answer = endless
    with pytest.raises((Invalid, Unreachable)):
        await coordinator.poll_report()
    assert sent <= client.LARGEST_REPORT.size + 16 * 2**20
    sent = 0
    with pytest.raises((Invalid, Unreachable)):
        await coordinator.put_plan(plan())
    assert sent <= 16 * 2**20


async def test_a_body_that_comes_byte_by_byte_has_a_deadline(
    hostile: Hostile, coordinator: CoordinatorClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "ANSWER_WITHIN", 0.3)

    async def trickle(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        while True:
            await answer.write(b" ")
            await asyncio.sleep(0.05)
        return answer

    hostile.answer = trickle
    async with asyncio.timeout(5):
        with pytest.raises(Unreachable, match="no answer"):
            await coordinator.poll_report()


HEAD = b'{"runId":"r","sequence":1,"planGeneration":0,"ready":true,'
TASK = b'{"uid":"u","phase":"Prepared"'


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 1_000_000,
        HEAD + b'"tasks":' + b'[{"data":' * 100_000,
        HEAD.replace(b'"sequence":1', b'"sequence":' + b"9" * 1_000_000) + b'"tasks":[]}',
        HEAD + b'"tasks":[' + b"{}," * 2_000_000 + b"{}]}",
        HEAD + b'"tasks":[' + b"0," * 1_000_000 + b"0]}",
        HEAD + b'"tasks":[' + b"[]," * 250_000 + b"[]]}",
        HEAD + b'"tasks":[' + b'{"uid":1},' * 250_000 + b"{}]}",
        HEAD
        + b'"tasks":['
        + TASK
        + b',"data":{"rows":1,"used":1,"dropped":{'
        + b",".join(b'"%d":-1' % number for number in range(1_000_000))
        + b"}}}]}",
        HEAD + b'"stages":[' + b'{"stage":-1},' * 200_000 + b"{}]}",
        HEAD + b'"facts":{"modules":[' + b'{"stage":-1},' * 200_000 + b"{}]}}",
        b"\xff\xfe" * 1000,
        b"",
    ],
    ids=[
        "deep lists", "deep objects", "digits", "objects", "numbers", "lists", "wrong tasks", "wrong counts",
        "wrong stages", "wrong modules", "no text", "nothing",
    ],
)  # fmt: skip
async def test_what_would_become_too_many_objects_or_errors_is_refused(
    hostile: Hostile, coordinator: CoordinatorClient, body: bytes
) -> None:
    """A parser makes a hundred bytes of two, and a list of errors a kilobyte of each."""

    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(body=body, content_type="application/json")

    hostile.answer = answer
    tracemalloc.start()
    try:
        with pytest.raises(Invalid) as caught:
            await coordinator.poll_report()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 96 * 2**20
    assert len(str(caught.value)) < 1000


async def test_it_is_shown_no_cookie_that_it_set(hostile: Hostile, coordinator: CoordinatorClient) -> None:
    async def sweet(request: web.Request) -> web.StreamResponse:
        answer = await hostile.good(request)
        answer.set_cookie("taste", "x" * 1000)
        return answer

    hostile.answer = sweet
    for _ in range(2):
        await coordinator.poll_report()
    assert hostile.cookies == [None, None]


async def test_the_words_of_an_error_stay_on_one_line(
    hostile: Hostile, coordinator: CoordinatorClient
) -> None:
    async def words(_: web.Request) -> web.StreamResponse:
        return web.Response(status=500, body=b"one\r\ntwo\x1b[31m\x00" + b"x" * 5000)

    hostile.answer = words
    with pytest.raises(Unreachable) as caught:
        await coordinator.poll_report()
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 700


async def _until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - what is waited for says nothing when it comes
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "headers",
    [{"Content-Type": "application/json; charset=no-such"}, {"Content-Type": "text/plain; charset=idna"}],
)
async def test_a_link_goes_on_asking_whatever_is_answered(
    hostile: Hostile, server: TestServer, headers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has ended would show the last report for ever, as if it spoke of now."""
    monkeypatch.setattr("mlora_operator.coordinator.links.RETRY_AFTER", 0.01)

    async def odd(_: web.Request) -> web.StreamResponse:
        return web.Response(body=b"\xff" * 100, headers=headers)

    hostile.answer = odd
    async with Links(lambda: None, lambda: NOW) as links:
        links.follow({TOY: Endpoint(str(server.make_url("")), "hush")})
        async with asyncio.timeout(10):
            await _until(lambda: len(hostile.asked) >= 3)
            assert links.contacts()[TOY].live is None
            hostile.answer = hostile.good
            await _until(lambda: links.contacts()[TOY].live is not None)


async def test_a_link_survives_an_error_that_nobody_thought_of(
    server: TestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlora_operator.coordinator.links.RETRY_AFTER", 0.01)
    asked = 0

    async def odd(*_: object, **__: object) -> Report:
        nonlocal asked
        asked += 1
        if asked < 3:
            raise LookupError("unknown encoding")
        return GOOD

    monkeypatch.setattr(CoordinatorClient, "poll_report", odd)
    async with Links(lambda: None, lambda: NOW) as links:
        links.follow({TOY: Endpoint(str(server.make_url("")), "hush")})
        async with asyncio.timeout(10):
            await _until(lambda: links.contacts()[TOY].live is not None)
    assert asked >= 3
