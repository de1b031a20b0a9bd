"""Calls that are put off are made in the order in which they are due, by one thread, whatever one of them does."""

from __future__ import annotations

import threading

import pytest

from mlora_worker.coordinator.uploads.timer import DelayedCalls


def test_calls_are_made_when_they_are_due_and_one_that_fails_holds_none_up() -> None:
    later, made, whose, over = DelayedCalls(), list[str](), set[str](), threading.Event()

    def call(name: str) -> None:
        made.append(name)
        whose.add(threading.current_thread().name)
        if name == "fails":
            raise RuntimeError(name)
        if name == "last":
            over.set()

    for seconds, name in [(0.3, "last"), (0.15, "second"), (0.05, "fails"), (0.0, "at once")]:
        later(seconds, lambda name=name: call(name))  # type: ignore[misc]
    assert over.wait(10)
    assert made == ["at once", "fails", "second", "last"]
    assert whose == {"later"}


def test_a_call_is_made_though_no_thread_could_be_started_when_it_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = DelayedCalls().start()  # as a rank does before its memory has a limit
    bare, made = DelayedCalls(), threading.Semaphore(0)

    def none_left(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none_left)
        started(0.0, made.release)
        assert made.acquire(timeout=10)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            bare(0.0, made.release)
    bare(0.0, made.release)
    assert made.acquire(timeout=10)
    assert made.acquire(timeout=10)
