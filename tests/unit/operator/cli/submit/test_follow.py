"""Following tasks through whatever becomes of the connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import aiohttp
import pytest

from mlora_operator.cli.kube.client import KubeError
from mlora_operator.cli.kube.retry import RetryTimeouts, insist
from mlora_operator.cli.submit.follow import follow

CUT = aiohttp.ClientPayloadError("connection cut")
REFUSED = ConnectionRefusedError("connection refused")
GONE = KubeError(410, "too old resource version", "Expired")


def task(name: str, version: int, state: str = "Training", namespace: str = "n") -> dict[str, Any]:
    meta = {"name": name, "namespace": namespace, "resourceVersion": str(version)}
    return {"metadata": meta, "spec": {}, "status": {"state": state}}


def changed(name: str, version: int, state: str = "Training", type_: str = "MODIFIED") -> dict[str, Any]:
    return {"type": type_, "object": task(name, version, state)}


class Clock:
    def __init__(self) -> None:
        self.time = 0.0
        self.pauses: list[float] = []

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.time += seconds


class Source:
    """Plays a script. A list answers a list request, a tuple is a watch (that ends, or breaks with its error)."""

    def __init__(self, clock: Clock, *script: Any, lasts: float = 60) -> None:
        self._lasts = lasts  # seconds of a healthy watch
        self._script = list(script)
        self._clock = clock
        self.asked: list[str] = []

    def _next(self, kind: type[Any]) -> Any:
        if not self._script:
            raise ScriptEnded
        answer = self._script.pop(0)
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, kind), f"asked for a {kind.__name__}, the script has {answer!r}"
        return answer

    async def renew(self) -> None:
        self.asked.append("renew")

    async def tasks(self, namespace: str | None, name: str | None = None) -> tuple[list[dict[str, Any]], str]:
        self.asked.append(f"list {namespace} {name}")
        return self._next(list), "10"

    async def task_events(
        self,
        namespace: str | None,  # noqa: ARG002 - the protocol's signature
        version: str,
        name: str | None = None,  # noqa: ARG002
    ) -> AsyncIterator[dict[str, Any]]:
        self.asked.append(f"watch {version}")
        for event in self._next(tuple):
            if isinstance(event, Exception):
                raise event
            yield event
        self._clock.time += self._lasts


class ScriptEnded(BaseException):
    pass


PATIENCE = RetryTimeouts(first=5, later=50)


def play(
    *script: Any, patience: RetryTimeouts = PATIENCE, namespace: str | None = "n"
) -> tuple[list[str], Source, Clock]:
    """What was seen, each time as ``name=state ...``, until the script ends."""
    clock = Clock()
    source, seen = Source(clock, *script), list[str]()

    async def run() -> None:
        tasks = follow(source, namespace, None, patience, clock.now, clock.sleep)
        async with aclosing(tasks):
            async for known in tasks:
                seen.append(" ".join(f"{name}={one['status']['state']}" for name, one in known.items()))

    try:
        asyncio.run(run())
    except ScriptEnded:
        return seen, source, clock
    raise AssertionError("follow ended by itself")


def test_a_list_then_its_changes() -> None:
    seen, source, _ = play(
        [task("a", 1), task("b", 2)],
        (changed("a", 11, "Saving"), changed("b", 12, type_="DELETED"), changed("c", 13, type_="ADDED")),
    )
    assert seen == ["a=Training b=Training", "a=Saving b=Training", "a=Saving", "a=Saving c=Training"]
    assert source.asked == ["list n None", "watch 10", "watch 13"]


def test_tasks_of_all_namespaces_are_told_apart_though_their_names_are_the_same() -> None:
    gone = {"type": "DELETED", "object": task("a", 11, namespace="m")}
    seen, source, _ = play([task("a", 1), task("a", 2, "Queued", "m")], (gone,), namespace=None)
    assert seen == ["n/a=Training m/a=Queued", "n/a=Training"]
    assert source.asked[0] == "list None None"


def test_a_watch_that_is_cut_goes_on_where_it_was() -> None:
    seen, source, _ = play(
        [task("a", 1)],
        (changed("a", 11, "Saving"), CUT),
        REFUSED,
        (changed("a", 12, "Succeeded"),),
    )
    assert seen == ["a=Training", "a=Saving", "a=Succeeded"]
    assert source.asked == ["list n None", "watch 10", "watch 11", "watch 11", "watch 12"]


def test_bookmarks_move_the_version_and_are_not_shown() -> None:
    bookmark = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "99"}}}
    seen, source, _ = play([task("a", 1)], (bookmark,))
    assert seen == ["a=Training"]
    assert source.asked[-1] == "watch 99"


@pytest.mark.parametrize("where", ["as an answer", "in the stream"])
def test_a_version_that_is_too_old_is_listed_anew(where: str) -> None:
    watch: Any = GONE if where == "as an answer" else (GONE,)
    seen, source, clock = play([task("a", 1), task("b", 1)], watch, [task("a", 50, "Succeeded")])
    assert seen == ["a=Training b=Training", "a=Succeeded"]
    assert source.asked == ["list n None", "watch 10", "list n None", "watch 10"]
    assert clock.pauses == [0.5]


def test_an_api_server_that_restarts_is_waited_for() -> None:
    seen, source, clock = play(
        [task("a", 1)],
        (CUT,),
        *[REFUSED] * 4,
        KubeError(500, "etcd is not ready"),
        KubeError(403, "clusterrole not found"),
        KubeError(404, "404 page not found"),
        [task("a", 20, "Succeeded")],
    )
    assert seen == ["a=Training", "a=Succeeded"]
    assert clock.pauses == [0.5, 1, 2, 4, 5, 5, 5, 5]
    assert source.asked.count("list n None") == 4


def test_a_token_that_has_ended_is_renewed() -> None:
    _, source, _ = play([task("a", 1)], KubeError(401, "Unauthorized"), [task("a", 2)])
    assert source.asked == ["list n None", "watch 10", "renew", "list n None", "watch 10"]


def test_a_watch_that_ends_at_once_again_and_again_is_not_opened_without_a_pause() -> None:
    clock = Clock()
    source = Source(clock, [task("a", 1)], (), (), (), lasts=0)

    async def run() -> None:
        async for _ in follow(source, "n", None, RetryTimeouts(), clock.now, clock.sleep):
            pass

    with pytest.raises(ScriptEnded):
        asyncio.run(run())
    assert clock.pauses == [0.5, 1, 2]


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ([REFUSED] * 9, ConnectionRefusedError),  # never there: told soon
        ([KubeError(403, "no right")], KubeError),  # a refusal at the first answer is told at once
        ([[task("a", 1)], *[REFUSED] * 99], ConnectionRefusedError),
        ([[task("a", 1)], *[TimeoutError()] * 99], ConnectionError),  # not what a caller's timeout raises
    ],
)
def test_patience_ends(script: list[Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        play(*script)


@pytest.mark.parametrize(
    ("answers", "ends"),
    [
        ([REFUSED, KubeError(429, "busy"), "done"], "done"),
        ([KubeError(422, "wrong")], KubeError),
        ([REFUSED] * 99, ConnectionRefusedError),
    ],
)
def test_a_write_is_insisted_on_while_the_cluster_does_not_answer(answers: list[Any], ends: Any) -> None:
    clock = Clock()
    left = list(answers)

    async def call() -> str:
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    async def run() -> str:
        return await insist(call, 60, clock.now, clock.sleep)

    ask: Callable[[], str] = lambda: asyncio.run(run())  # noqa: E731
    if isinstance(ends, str):
        assert ask() == ends
    else:
        with pytest.raises(ends):
            ask()
    assert clock.time < 70
