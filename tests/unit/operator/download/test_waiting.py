"""Waiting for an adapter: what ends the wait, and what does not."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from mlora_operator.download import AdapterNotFound, StoreRefused, StoreSilent, await_manifest


class Clock:
    """Time that passes only while someone pauses."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def pause(self, seconds: float) -> None:
        self.time += seconds


class Store:
    """Answers one after the other; the last one for ever. Text is a task's uid, anything else is raised."""

    def __init__(self, *answers: str | Exception) -> None:
        self._answers = list(answers)
        self.asked = 0

    def read(self, name: str, start: int = 0) -> Iterator[bytes]:  # noqa: ARG002 - the protocol's signature
        self.asked += 1
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        manifest = {
            "taskUid": answer,
            "namespace": "n",
            "name": "a",
            "baseModel": "m",
            "step": 1,
            "files": [],
        }
        yield json.dumps(manifest).encode()


NONE, SILENT = AdapterNotFound("nothing there"), StoreSilent("no answer")


def wait(store: Store, seconds: float | None, clock: Clock) -> str:
    return await_manifest(
        store, lambda found: found.task_uid == "u", seconds, clock.now, clock.pause
    ).task_uid


@pytest.mark.parametrize(
    "answers",
    [["u"], [NONE, "u"], [SILENT, "u"], ["another", NONE, "u"]],
    ids=["there", "late", "silent", "other"],
)
def test_the_wanted_adapter_ends_the_wait(answers: list[str | Exception]) -> None:
    store = Store(*answers)
    assert wait(store, None, Clock()) == "u"
    assert store.asked == len(answers)


@pytest.mark.parametrize(
    ("answer", "words"),
    [(NONE, "nothing there"), (SILENT, "no answer"), ("another", "belongs to another task: n/a")],
)
def test_the_end_of_patience_says_what_was_seen_last(answer: str | Exception, words: str) -> None:
    clock = Clock()
    with pytest.raises(TimeoutError, match=words):
        wait(Store(answer), 100.0, clock)
    assert clock.time == 100.0


def test_a_refusal_ends_the_wait_at_once() -> None:
    clock = Clock()
    with pytest.raises(StoreRefused):
        wait(Store(StoreRefused("wrong keys")), 100.0, clock)
    assert clock.time == 0.0


def test_the_store_is_asked_less_and_less_often_but_at_least_each_quarter_of_a_minute() -> None:
    clock, store = Clock(), Store(NONE)
    with pytest.raises(TimeoutError):
        wait(store, 3600.0, clock)
    assert 240 <= store.asked <= 255
