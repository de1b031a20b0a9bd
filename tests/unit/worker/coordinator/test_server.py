"""The coordinator's timeline over HTTP: all of it, or the newest microbatches."""

from __future__ import annotations

from typing import cast

import pytest
from aiohttp.test_utils import TestClient, TestServer

from mlora_worker.coordinator.server import coordinator_app
from mlora_worker.coordinator.service import Coordinator
from mlora_worker.stream.simulate import EvenCosts, Workload, simulate
from mlora_worker.stream.timeline import Timeline, latest

TIMELINE = simulate([Workload("a", [[10]] * 20)], 2, 100, EvenCosts(1e-3, 2e-3))


class Recorded:
    def timeline(self) -> Timeline:
        return TIMELINE


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
