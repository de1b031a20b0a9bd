"""What kopf gets as its memo."""

from __future__ import annotations

import copy

from mlora_operator.handlers import Runtime
from mlora_operator.settings import Settings


class Wakes:
    def __init__(self) -> None:
        self.count = 0

    def wake(self) -> None:
        self.count += 1


async def test_an_event_of_an_object_that_was_first_seen_long_ago_wakes_the_loop_of_now() -> None:
    """kopf copies its memo for each object when it first sees it."""
    runtime = Runtime(Settings.model_validate({"namespace": "n", "worker": {"image": "w"}}))
    of_an_object = copy.copy(runtime)
    loop = Wakes()
    runtime.loop = loop  # type: ignore[assignment]
    of_an_object.saw("pods", "MODIFIED", {"metadata": {"uid": "u"}})
    assert loop.count == 1
