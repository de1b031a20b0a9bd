"""The probe proves that passes succeed and that watches live."""

from __future__ import annotations

import aiohttp
import pytest

from mlora_operator.health import FailureStreak, Liveness, examine, serve_health

WATCHES = ("watcher for loratasks.v1alpha1.mlora.dev@None", "watcher for pods.v1@team-a")


@pytest.mark.parametrize(
    ("story", "silence", "running", "words"),
    [
        ("all is well", 1.0, WATCHES, ()),
        ("nothing has happened yet", None, WATCHES, ()),
        ("the loop hangs", 61.0, WATCHES, ("no reconcile pass has finished for 61 s",)),
        ("a watch has died", 1.0, WATCHES[:1], ("no watch on pods",)),
        (
            "both",
            99.0,
            (),
            ("no watch on loratasks", "no watch on pods", "no reconcile pass has finished for 99 s"),
        ),
    ],
)
def test_examination(
    story: str, silence: float | None, running: tuple[str, ...], words: tuple[str, ...]
) -> None:
    assert examine(silence, 60, ("loratasks", "pods"), running).problems == words, story


@pytest.mark.parametrize(
    ("story", "failures", "problems"),
    [
        ("passes succeed", None, ()),
        ("one has failed just now", FailureStreak(1.0, 2, "ValueError: x"), ()),
        ("many have failed, in a moment", FailureStreak(30.0, 30, "ValueError: x"), ()),
        ("two long ones have failed", FailureStreak(90.0, 2, "ValueError: x"), ()),
        (
            "they fail",
            FailureStreak(61.0, 60, "OverflowError: too large"),
            ("60 consecutive passes failed within 61 s, the last one with OverflowError: too large",),
        ),
    ],
)
def test_passes_that_end_and_fail_are_not_health(
    story: str, failures: FailureStreak | None, problems: tuple[str, ...]
) -> None:
    running = ("watcher for pods.v1@team-a",)
    assert examine(0.5, 60, ("pods",), running, failures).problems == problems, story


async def test_the_probe_answers_in_words(unused_tcp_port: int) -> None:
    now = [Liveness()]
    runner = await serve_health(unused_tcp_port, lambda: now[0])
    try:
        async with aiohttp.ClientSession() as session:
            for health, status, text in (
                (Liveness(), 200, "ok\n"),
                (Liveness(("no watch on pods",)), 503, "no watch on pods\n"),
            ):
                now[0] = health
                async with session.get(f"http://127.0.0.1:{unused_tcp_port}/healthz") as answer:
                    assert (answer.status, await answer.text()) == (status, text)
    finally:
        await runner.cleanup()
