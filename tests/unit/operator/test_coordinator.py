"""The HTTP client and the long poll, against a server that speaks the protocol."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from mlora_operator.coordinator import (
    CoordinatorClient,
    Invalid,
    Links,
    Starting,
    Unauthorized,
    Unreachable,
)
from mlora_operator.coordinator.reading import open_session
from mlora_operator.reconcile.cluster.config_map_texts import TextGone
from mlora_operator.reconcile.ports import Endpoint, WriteRefused
from mlora_operator.reconcile.state.snapshot import ConfigMapText, Contact, Key, TextDigests
from mlora_worker.protocol import (
    REPORT_FORMAT,
    Dataset,
    LoRAConfig,
    Plan,
    Report,
    TaskPhase,
    TaskPlan,
    TaskReport,
    Training,
)

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
TOY = Key("team-a", "toy")


class Peer:
    """A coordinator whose answers the test sets."""

    def __init__(self) -> None:
        self.status = 200
        self.report = Report(run_id="run-1", sequence=1, plan_generation=0, ready=True, lacks=())
        self.texts: dict[str, str] = {}  # by digest
        self.plans: list[Plan] = []
        self.changed = asyncio.Condition()
        self.polls: list[dict[str, str]] = []
        self.formats: list[str | None] = []  # of reports, that were said to be understood
        self.token = "hush"

    async def set(self, **changes: object) -> None:
        async with self.changed:
            self.report = self.report.model_copy(update=changes)
            self.changed.notify_all()

    async def put(self, request: web.Request) -> web.Response:
        self._check(request)
        self.plans.append(Plan.model_validate_json(await request.text()))
        return web.Response(status=204)

    async def put_text(self, request: web.Request) -> web.Response:
        self._check(request)
        self.texts[request.match_info["digest"]] = await request.text()
        return web.Response(status=204)

    async def get(self, request: web.Request) -> web.Response:
        self.polls.append(dict(request.query))
        self.formats.append(request.headers.get("X-MLoRA-Report"))
        self._check(request)
        after = int(request.query.get("after", "-1"))
        async with self.changed:
            try:
                async with asyncio.timeout(float(request.query.get("wait", "0"))):
                    await self.changed.wait_for(lambda: self.report.sequence > after)
            except TimeoutError:
                pass
        return web.Response(text=self.report.to_json(), content_type="application/json")

    def _check(self, request: web.Request) -> None:
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            raise web.HTTPUnauthorized
        if self.status != 200:
            raise {
                503: web.HTTPServiceUnavailable,
                500: web.HTTPInternalServerError,
                409: web.HTTPConflict,
                422: web.HTTPUnprocessableEntity,
            }[self.status](text="in words")


@pytest.fixture
async def peer() -> Peer:
    return Peer()


@pytest.fixture
async def server(peer: Peer) -> AsyncIterator[TestServer]:
    app = web.Application()
    app.add_routes([web.put("/v1/plan", peer.put), web.get("/v1/report", peer.get)])
    app.add_routes([web.put("/v1/texts/{digest}", peer.put_text)])
    async with TestServer(app) as running:
        yield running


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as made:
        yield made


def client(session: aiohttp.ClientSession, server: TestServer, token: str = "hush") -> CoordinatorClient:
    return CoordinatorClient(session, Endpoint(str(server.make_url("/")), token))


async def test_a_poll_says_which_format_of_a_report_is_understood(
    peer: Peer, server: TestServer, session: aiohttp.ClientSession
) -> None:
    await client(session, server).poll_report()
    assert peer.formats == [str(REPORT_FORMAT)]


async def test_a_plan_arrives_as_it_was_sent(
    peer: Peer, server: TestServer, session: aiohttp.ClientSession
) -> None:
    await client(session, server).put_plan(Plan(generation=3))
    assert peer.plans == [Plan(generation=3)]


async def test_a_poll_waits_for_news(peer: Peer, server: TestServer, session: aiohttp.ClientSession) -> None:
    first = await client(session, server).poll_report()
    waiting = asyncio.create_task(client(session, server).poll_report(after=first.sequence, wait=5))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await peer.set(sequence=2)
    assert (await waiting).sequence == 2


@pytest.mark.parametrize(("status", "error"), [(503, Starting), (500, Unreachable), (422, Invalid)])
async def test_errors_have_a_type_and_the_answers_words(
    peer: Peer, server: TestServer, session: aiohttp.ClientSession, status: int, error: type[Exception]
) -> None:
    peer.status = status
    with pytest.raises(error, match="in words"):
        await client(session, server).poll_report()
    with pytest.raises(error, match="in words"):
        await client(session, server).put_plan(Plan(generation=1))


async def test_a_wrong_token_is_told_apart(server: TestServer, session: aiohttp.ClientSession) -> None:
    with pytest.raises(Unauthorized):
        await client(session, server, token="wrong").poll_report()


async def test_nobody_there_is_unreachable(session: aiohttp.ClientSession, unused_tcp_port: int) -> None:
    endpoint = Endpoint(f"http://127.0.0.1:{unused_tcp_port}", "hush")
    with pytest.raises(Unreachable):
        await CoordinatorClient(session, endpoint).poll_report()


async def test_what_is_no_report_is_invalid(
    peer: Peer, server: TestServer, session: aiohttp.ClientSession
) -> None:
    peer.report = peer.report.model_construct(run_id="x", sequence=1, plan_generation=0, ready=None)  # type: ignore[arg-type]
    with pytest.raises(Invalid, match="report"):
        await client(session, server).poll_report()


def test_a_token_is_in_no_representation() -> None:
    assert "hush" not in repr(Endpoint("http://x", "hush"))


# --- links ---


class Waker:
    def __init__(self) -> None:
        self.woken = asyncio.Event()

    def __call__(self) -> None:
        self.woken.set()

    async def wait(self) -> None:
        async with asyncio.timeout(5):
            await self.woken.wait()
        self.woken.clear()


async def follow(links: Links, waker: Waker, server: TestServer, token: str = "hush") -> Contact:
    links.follow({TOY: Endpoint(str(server.make_url("/")), token)})
    await waker.wait()
    return links.contacts()[TOY]


async def test_a_link_keeps_the_last_report_and_wakes_the_loop(peer: Peer, server: TestServer) -> None:
    waker = Waker()
    async with Links(waker, lambda: NOW) as links:
        links.follow({TOY: Endpoint(str(server.make_url("/")), "hush")})
        before = links.contacts()[TOY]
        assert (before.live, before.lost_since) == (None, NOW)
        await waker.wait()
        assert links.contacts()[TOY].live == peer.report
        await peer.set(sequence=2, plan_generation=7)
        await waker.wait()
        report = links.contacts()[TOY].live
        assert report is not None
        assert report.plan_generation == 7


async def test_a_plan_that_was_taken_is_remembered(peer: Peer, server: TestServer) -> None:
    waker = Waker()
    async with Links(waker, lambda: NOW) as links:
        await follow(links, waker, server)
        await links.send_plan(TOY, Plan(generation=4))
        contact = links.contacts()[TOY]
        assert (contact.sent, contact.sent_run) == (Plan(generation=4), "run-1")
        peer.status = 422
        with pytest.raises(WriteRefused, match="in words"):
            await links.send_plan(TOY, Plan(generation=5))
        refusal = links.contacts()[TOY].refused
        assert refusal is not None
        assert refusal.whole is not None
        assert "in words" in refusal.whole
        peer.status = 409  # the next one may be taken at once
        with pytest.raises(Invalid):
            await links.send_plan(TOY, Plan(generation=5))
        assert links.contacts()[TOY].sent == Plan(generation=4)
        peer.status = 200
        await links.send_plan(TOY, Plan(generation=6))
        assert links.contacts()[TOY].refused is None


async def test_after_a_jump_of_the_clock_a_lost_coordinator_is_lost_from_then_on(server: TestServer) -> None:
    moments = [NOW]
    async with Links(Waker(), lambda: moments[-1]) as links:
        links.follow({TOY: Endpoint(str(server.make_url("/")), "hush")})
        moments.append(NOW + timedelta(hours=1))
        assert links.contacts()[TOY].lost_since == NOW
        links.clock_jumped()
        assert links.contacts()[TOY].lost_since == moments[-1]


async def test_a_coordinator_that_is_loading_anew_has_said_nothing_yet(
    peer: Peer, server: TestServer
) -> None:
    waker = Waker()
    async with Links(waker, lambda: NOW) as links:
        await follow(links, waker, server)
        task = TaskPlan(
            uid="uid-1", namespace="n", name="a", base_model="m", lora=LoRAConfig(), dataset=Dataset(inline="{}"),
            training=Training(), output_uri="s3://b/p", dataset_digest="ab" * 32,
        )  # fmt: skip
        await links.send_plan(TOY, Plan(generation=4, tasks=(task,)))
        peer.status = 503
        await peer.set(sequence=2)
        while not links.contacts()[TOY].starting:
            await waker.wait()
        contact = links.contacts()[TOY]
        assert (contact.starting, contact.report, contact.sent) == (True, None, None)
        assert contact.texts_before == {"uid-1": TextDigests("ab" * 32, None)}


ROWS, TEMPLATE = ConfigMapText.of("rows \u00e4\u2028\x01"), ConfigMapText.of("{{ messages }}")
TEXTS = {ROWS.digest: "rows \u00e4\u2028\x01", TEMPLATE.digest: "{{ messages }}"}


async def read(digest: str) -> str:
    try:
        return TEXTS[digest]
    except KeyError:
        raise TextGone("it was edited") from None


def planned(uid: str, **fields: str) -> TaskPlan:
    return TaskPlan(
        uid=uid, namespace="n", name=uid, base_model="m", lora=LoRAConfig(), dataset=Dataset(inline="{}"),
        training=Training(), output_uri="s3://b/p", **fields,
    )  # fmt: skip


BOTH = Plan(
    generation=4,
    tasks=(
        planned("there", dataset_digest=ROWS.digest),
        planned("new", dataset_digest=ROWS.digest, template_digest=TEMPLATE.digest),
        planned("inline"),
    ),
)


async def test_a_text_arrives_as_it_was_read(peer: Peer, server: TestServer) -> None:
    waker = Waker()
    async with Links(waker, lambda: NOW) as links:
        await follow(links, waker, server)
        for digest, text in TEXTS.items():
            await links.send_text(TOY, digest, text)
        await links.send_text(TOY, ConfigMapText.of("half \ud800").digest, "half \ud800")
        await links.send_plan(TOY, BOTH, read)
        with pytest.raises(Unreachable):
            await links.send_text(Key("no", "link"), ROWS.digest, "rows")
    assert peer.texts == {**TEXTS, ConfigMapText.of("half ?").digest: "half ?"}
    assert peer.plans == [BOTH], "it is told of digests alone"


async def test_workers_of_a_former_version_get_texts_in_plans_and_each_once(
    peer: Peer, server: TestServer
) -> None:
    """They keep the text of a task that they have heard of, and would refuse a field that they do not know."""
    waker = Waker()
    known = TaskReport(uid="there", phase=TaskPhase.PREPARING)
    await peer.set(lacks=None, tasks=(known,))
    async with Links(waker, lambda: NOW) as links:
        await follow(links, waker, server)
        await links.send_plan(TOY, BOTH, read)
        assert links.contacts()[TOY].sent == BOTH, "what it was told, whatever way it was said"
        gone = Plan(generation=5, tasks=(planned("lost", dataset_digest="0" * 64),))
        with pytest.raises(TextGone):
            await links.send_plan(TOY, gone, read)
    (sent,) = peer.plans
    rows, template = TEXTS.values()
    assert [(task.dataset_text, task.template_text) for task in sent.tasks] == [
        (None, None),
        (rows, template),
        (None, None),
    ]
    assert "Digest" not in sent.to_json()


async def test_a_restarted_coordinator_that_counts_from_zero_is_heard(peer: Peer, server: TestServer) -> None:
    waker = Waker()
    await peer.set(sequence=100)
    async with Links(waker, lambda: NOW) as links:
        await follow(links, waker, server)
        peer.status = 500
        await peer.set(sequence=101)
        while links.contacts()[TOY].lost_since is None:
            await waker.wait()
        peer.status = 200
        await peer.set(run_id="run-2", sequence=0)
        while (live := links.contacts()[TOY].live) is None or live.run_id != "run-2":
            await waker.wait()
        await peer.set(sequence=1, plan_generation=9)
        await waker.wait()
        live = links.contacts()[TOY].live
        assert live is not None
        assert live.plan_generation == 9


async def test_a_link_ends_when_it_is_no_longer_wanted(server: TestServer) -> None:
    waker = Waker()
    async with Links(waker, lambda: NOW) as links:
        await follow(links, waker, server)
        links.follow({})
        assert links.contacts() == {}
        await asyncio.sleep(0)
        assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("report poll")]
        with pytest.raises(Unreachable):
            await links.send_plan(TOY, Plan(generation=1))


async def test_another_token_makes_the_link_anew(server: TestServer) -> None:
    waker = Waker()
    async with Links(waker, lambda: NOW) as links:
        links.follow({TOY: Endpoint(str(server.make_url("/")), "wrong")})
        await asyncio.sleep(0.1)
        assert links.contacts()[TOY].error is not None
        assert "token" in str(links.contacts()[TOY].error)
        assert (await follow(links, waker, server)).live is not None


async def test_a_new_token_takes_over_from_the_former_one_without_a_gap(
    peer: Peer, server: TestServer
) -> None:
    """It is with the operator at once, and with the coordinator when the kubelet has brought it there."""
    waker, url = Waker(), str(server.make_url("/"))
    async with Links(waker, lambda: NOW) as links:
        before = await follow(links, waker, server)
        await links.send_plan(TOY, Plan(generation=1))
        links.follow({TOY: Endpoint(url, "new")})
        assert links.contacts()[TOY].live == before.live, "what was known stays"
        await links.send_plan(TOY, Plan(generation=2))
        await peer.set(sequence=2, plan_generation=2)
        await waker.wait()
        assert links.contacts()[TOY].lost_since is None

        peer.token = "new"
        await links.send_plan(TOY, Plan(generation=3))
        assert [plan.generation for plan in peer.plans] == [1, 2, 3]
        peer.token = "hush"  # it counts no longer
        with pytest.raises(Unauthorized):
            await links.send_plan(TOY, Plan(generation=4))


async def test_a_former_token_is_never_shown_to_another_address(peer: Peer, server: TestServer) -> None:
    waker = Waker()
    async with Links(waker, lambda: NOW) as links:
        links.follow({TOY: Endpoint("http://127.0.0.1:9/", "hush")})
        links.follow({TOY: Endpoint(str(server.make_url("/")), "new")})
        with pytest.raises(Unauthorized):
            await links.send_plan(TOY, Plan(generation=1))
        assert peer.plans == []


async def test_a_connection_is_used_for_one_question_after_the_other(peer: Peer) -> None:
    """A handshake for each costs four times the question."""
    connections = set()

    async def get(request: web.Request) -> web.Response:
        connections.add(request.transport)
        return await peer.get(request)

    app = web.Application()
    app.add_routes([web.put("/v1/plan", peer.put), web.get("/v1/report", get)])
    async with TestServer(app) as running, open_session() as made:
        for _ in range(5):
            await client(made, running).poll_report()
    assert len(connections) == 1


async def test_a_coordinator_that_came_back_is_asked_anew(peer: Peer, unused_tcp_port: int) -> None:
    """Its connection ended with the former process: that is no failure."""
    app = [web.Application() for _ in range(2)]
    for one in app:
        one.add_routes([web.put("/v1/plan", peer.put), web.get("/v1/report", peer.get)])
    async with open_session() as made:
        for one in app:
            async with TestServer(one, port=unused_tcp_port) as running:
                for generation in range(2):
                    await client(made, running).put_plan(Plan(generation=generation))
    assert len(peer.plans) == 4


async def test_a_hundred_and_fifty_pipelines_are_waited_for_at_once(peer: Peer) -> None:
    waiting, all_wait = 0, asyncio.Event()

    async def get(request: web.Request) -> web.Response:
        nonlocal waiting
        waiting += 1
        if waiting == 150:
            all_wait.set()
        await all_wait.wait()
        return await peer.get(request)

    app = web.Application()
    app.add_routes([web.get("/v1/report", get)])
    async with TestServer(app) as running, open_session() as made:
        async with asyncio.timeout(30):
            await asyncio.gather(*(client(made, running).poll_report() for _ in range(150)))
