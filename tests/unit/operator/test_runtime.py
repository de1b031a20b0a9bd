"""What kopf gets as its memo."""

from __future__ import annotations

import copy
import time

from mlora_operator.handlers import Runtime
from mlora_operator.reconcile.failed_passes import FailedPasses
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


async def test_the_probe_is_red_while_passes_fail_though_each_of_them_ends() -> None:
    runtime = Runtime(Settings.model_validate({"namespace": "n", "worker": {"image": "w"}}))

    class Fails:
        last_pass = time.monotonic()
        failing: FailedPasses | None = FailedPasses(time.monotonic() - 100, 50, "OverflowError: too large")

    runtime.loop = Fails()  # type: ignore[assignment]
    told = [line for line in runtime._check().problems if not line.startswith("no watch")]
    assert len(told) == 1
    assert told[0].startswith("50 consecutive passes failed within 100 s")
    Fails.failing = None
    assert all(line.startswith("no watch") for line in runtime._check().problems)
