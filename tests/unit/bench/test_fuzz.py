"""The judge of the fuzz notices what it is there for, and the objects reach every field."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from random import Random
from unittest.mock import ANY

import aiohttp
import pytest

from bench.fuzz import Sent, note
from bench.fuzz_parts.fields import ITEM, LARGEST, MOST_ENTRIES, VALUE, Field, fields, spoilt, without_bounds
from bench.fuzz_parts.judge import Ground, escaped, forged
from bench.fuzz_parts.texts import FORGED, Hostile
from bench.operator_parts.server import Access, Server
from mlora_operator.api.crd import pipeline_crd, task_crd
from tests.fixtures.api_proxy import Request

GROUND = Ground("hostile", "own", frozenset({"s3-credentials"}))


@pytest.mark.parametrize(
    "path",
    [
        "/api/v1/namespaces/hostile/secrets/../../victim/secrets/keys",
        "/api/v1/namespaces/hostile/secrets/..%2f..%2fvictim%2fsecrets%2fkeys",
        "/api/v1/namespaces/hostile/secrets/..%252fkeys",
        "/api/v1/namespaces/victim/secrets/keys",
        "/api/v1/namespaces/own/secrets/another",
        "/api/v1/namespaces/own/configmaps/another",
        "/api/v1/namespaces/victim",
        "/api/v1/namespaces/hostile/secrets/",
        "/api/v1/namespaces/hostile/secrets/x?export=true",
        "/healthz",
        "/apis/apps/v1/namespaces/victim/statefulsets/x",
    ],
)
def test_a_request_that_leaves_is_noticed(path: str) -> None:
    assert escaped([Request("GET", path, 0.0)], GROUND) == [f"GET {path}"]


@pytest.mark.parametrize(
    "path",
    [
        "/api/v1/namespaces/hostile/secrets/keys",
        "/api/v1/namespaces/own/secrets/s3-credentials",
        "/api/v1/namespaces/hostile",
        "/apis/mlora.dev/v1alpha1/loratasks?watch=true&resourceVersion=1",
        "/api/v1/namespaces/victim/pods?labelSelector=a%3Db",
        "/apis/mlora.dev/v1alpha1/namespaces/hostile/loratasks/x/status?fieldManager=mlora-operator",
    ],
)
def test_a_request_of_the_ordinary_course_is_not(path: str) -> None:
    assert escaped([Request("GET", path, 0.0)], GROUND) == []


def test_a_line_that_no_record_has_made_is_noticed() -> None:
    record = "2026-01-01T00:00:00.000Z WARNING cannot read x"
    assert forged(f"{record}\n  Traceback\n  ValueError: x\n{record}") == []
    assert forged(f"{record}\n{FORGED} ERROR   forged") == [f"{FORGED} ERROR   forged"]
    assert forged(f"{record}\u2028all is well") == ["all is well"]


@pytest.mark.parametrize("crd", [task_crd(), pipeline_crd()], ids=["task", "pipeline"])
def test_every_field_gets_something_hostile_and_nothing_bounds_it(crd: dict) -> None:  # type: ignore[type-arg]
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    found = list(fields(schema))
    assert len(found) == len({one.path for one in found}) > 30
    hostile, random = Hostile("victim", Random(0)), Random(0)
    for one in found:
        assert spoilt({}, [one], hostile, random), one
    loose = str(without_bounds(crd)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"])
    assert not any(f"'{bound}'" in loose for bound in ("maxLength", "x-kubernetes-validations", "maximum"))


DEEP = [
    Field(("a", ITEM, "b", ITEM, "c", ITEM), "string"),
    Field(("a", VALUE, ITEM, VALUE), "string"),
    Field(("a", ITEM, "b", ITEM, "c", ITEM), "boolean"),
]


@pytest.mark.parametrize("deep", DEEP, ids=str)
def test_no_field_keeps_the_api_server_busy_for_longer_than_anybody_waits(deep: Field) -> None:
    """Seventy lists of seventy lists of long texts are half a gigabyte, and as many mistakes."""
    for seed in range(12):
        random = Random(seed)
        made = spoilt({}, [deep], Hostile("victim", random), random)
        assert len(json.dumps(made)) < 1.1 * LARGEST
        assert _leaves(made) <= MOST_ENTRIES


def _leaves(value: object) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 1 if inner is None else sum(map(_leaves, inner))


@contextlib.asynccontextmanager
async def _server(answer: bytes | None) -> AsyncIterator[Server]:
    """One that says ``answer`` to whatever comes, and then hangs up; or nothing at all."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if answer is None:
            await asyncio.sleep(60)
        writer.write(answer or b"")
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}") as session:
        server = Server(Access("", "", ""))
        server._session = session
        yield server
    listening.close()


@pytest.mark.parametrize("answer", [None, b"", b"HTTP/1.1 201 Cre"], ids=["silent", "hangs up", "half"])
async def test_a_server_that_gives_no_answer_ends_nothing_and_is_counted(answer: bytes | None) -> None:
    sent = Sent()
    async with _server(answer) as server:
        note(
            sent,
            await server.try_create("/x", {}, patience=0.2),
            {"kind": "LoRATask", "metadata": {"name": "a"}},
        )
    assert (sent.count, sent.stored, sent.refused, sent.unanswered) == (1, 0, {}, [ANY])
    assert sent.unanswered[0].startswith("LoRATask a, ")


async def test_a_server_that_answers_is_believed() -> None:
    async with _server(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n") as server:
        assert await server.try_create("/x", {}, patience=5.0) == 413


@pytest.mark.parametrize(
    "answer",
    [
        b'HTTP/1.1 503 Busy\r\nContent-Length: 17\r\n\r\n{"kind":"Status"}',
        b'HTTP/1.1 200 OK\r\nContent-Length: 90\r\n\r\n{"type":"MODI',
        b"",
    ],
    ids=["busy", "breaks off", "hangs up"],
)
async def test_a_watch_that_is_refused_or_breaks_off_is_begun_again(answer: bytes) -> None:
    async with _server(answer) as server:
        assert [event async for event in server.watch("/x", "1")] == [{"type": "ERROR"}]
