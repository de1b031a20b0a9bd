"""The coordinator over HTTP: its timeline, whole or the newest microbatches, and reports as their reader knows them."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest
from aiohttp.test_utils import TestClient, TestServer

from bench.pipeline_sim.simulate import EvenCosts, Workload, simulate
from mlora_worker.coordinator.http.server import coordinator_app
from mlora_worker.coordinator.service import Coordinator
from mlora_worker.protocol import DataCounts, Report, TaskPhase, TaskReport
from mlora_worker.stream.timeline import Timeline, latest

TIMELINE = simulate([Workload("a", [[10]] * 20)], 2, 100, EvenCosts(1e-3, 2e-3))
REPORT = Report(
    run_id="run", sequence=7, plan_generation=1, ready=True,
    tasks=(
        TaskReport(uid="a", phase=TaskPhase.TRAINING, step=3, crowded_out=True),
        TaskReport(uid="b", phase=TaskPhase.TRAINING, step=4, released=True),
        TaskReport(uid="c", phase=TaskPhase.TRAINING, step=5),
        TaskReport(
            uid="d",
            phase=TaskPhase.PREPARED,
            data=DataCounts(rows=3, used=3, special_tokens=2, first_dropped_in={"X": ("a",)}),
        ),
    ),
)  # fmt: skip


class Recorded:
    def timeline(self, newest: int = 0) -> Timeline:
        del newest  # it may give more
        return TIMELINE

    def wait_report(self, *_: float) -> Report:
        return REPORT


@pytest.mark.parametrize(
    ("query", "expected"),
    [("", TIMELINE), ("?microbatches=0", TIMELINE), ("?microbatches=4", latest(TIMELINE, 4))],
)
async def test_as_much_of_the_timeline_is_given_as_was_asked_for(query: str, expected: Timeline) -> None:
    app = coordinator_app(lambda: cast(Coordinator, Recorded()), lambda: "t")
    async with TestClient(TestServer(app), headers={"Authorization": "Bearer t"}) as client:
        answer = await client.get(f"/v1/timeline{query}")
        assert Timeline.model_validate_json(await answer.text()) == expected


async def test_a_number_that_is_none_is_refused() -> None:
    app = coordinator_app(lambda: cast(Coordinator, Recorded()), lambda: "t")
    async with TestClient(TestServer(app), headers={"Authorization": "Bearer t"}) as client:
        assert (await client.get("/v1/timeline?microbatches=many")).status == 400
        assert (await client.get("/v1/timeline", headers={"Authorization": ""})).status == 401


async def test_a_token_of_bytes_that_are_no_text_is_a_wrong_one() -> None:
    """It was an error of the server, with a traceback in the log for each request."""
    app = coordinator_app(lambda: cast(Coordinator, Recorded()), lambda: "t")
    async with TestServer(app) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET /v1/report HTTP/1.0\r\nAuthorization: Bearer \xff\r\n\r\n")
        assert b" 401 " in await reader.readline()
        writer.close()


@pytest.mark.parametrize("wait", ["0", "0.01"], ids=["at once", "held back"])
@pytest.mark.parametrize(
    ("header", "format"),
    [
        (None, 1),
        ("", 1),
        ("1", 1),
        ("new", 1),
        ("9" * 5000, 1),
        ("2", 2),
        ("3", 3),
        ("4", 4),
        ("5", 5),
        ("6", 6),
        ("7", 6),
    ],
    ids=[
        "none",
        "empty",
        "the first",
        "no number",
        "no number that is read",
        "a former one",
        "the one before",
        "the last but two",
        "the last but one",
        "the present one",
        "a later one",
    ],
)
async def test_a_reader_gets_the_fields_that_it_knows(header: str | None, format: int, wait: str) -> None:
    app = coordinator_app(lambda: cast(Coordinator, Recorded()), lambda: "t")
    known = {} if header is None else {"X-MLoRA-Report": header}
    async with TestClient(TestServer(app), headers={"Authorization": "Bearer t"} | known) as client:
        answer = await client.get(f"/v1/report?after=6&wait={wait}")
        tasks = (await answer.json())["tasks"]
    words = [sorted({"crowdedOut", "released"} & task.keys()) for task in tasks]
    assert words == ([["crowdedOut"], ["released"], [], []] if format >= 2 else [[], [], [], []])
    assert [task["step"] for task in tasks] == [3, 4, 5, 0]
    assert ("specialTokens" in tasks[3]["data"]) == (format >= 3)
    assert ("firstDroppedIn" in tasks[3]["data"]) == (format >= 6)
    assert tasks[3]["data"]["used"] == 3
