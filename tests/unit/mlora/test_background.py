"""Coroutines where an event loop runs already, and what an interrupt does to them."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading

import pytest

from mlora.background import run_to_end


async def doubled(number: int) -> int:
    await asyncio.sleep(0)
    return 2 * number


def test_a_coroutine_is_run_whether_a_loop_runs_or_not() -> None:
    async def in_a_notebook() -> int:
        return run_to_end(lambda: doubled(2))

    assert run_to_end(lambda: doubled(1)) == 2
    assert asyncio.run(in_a_notebook()) == 4


def test_what_it_raises_is_raised() -> None:
    async def wrong() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError, match="x"):
        run_to_end(wrong)


def test_an_interrupt_cancels_it_and_waits_for_its_end() -> None:
    program = """
import asyncio, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs tests in the background ignores it
from mlora.background import run_to_end

async def long():
    try:
        print("begun", flush=True)
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        print("cancelled", flush=True)
        raise
    finally:
        await asyncio.sleep(0.1)
        print("tidied up", flush=True)

try:
    run_to_end(long)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "begun\n"
        running.send_signal(signal.SIGINT)
        assert running.stdout.read() == "cancelled\ntidied up\ninterrupted\n"


def test_an_interrupt_before_it_begins_leaves_nothing_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []
    start = threading.Thread.start

    async def note() -> None:
        begun.append(1)

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        thread.join(0.2)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_to_end(note)
    assert begun == []
