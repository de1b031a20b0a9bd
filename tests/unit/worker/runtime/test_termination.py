"""SIGTERM: whoever listens gets its time, once."""

from __future__ import annotations

import threading

from mlora_worker.runtime.termination import Termination


def test_a_rank_with_nothing_to_lose_ends_at_once() -> None:
    left: list[str] = []
    Termination(60, lambda: left.append("left")).ask()
    assert left == ["left"]


def test_a_listener_is_told_in_a_thread_of_its_own_and_the_second_signal_ends_the_rank() -> None:
    left: list[str] = []
    told: list[threading.Thread] = []
    heard = threading.Event()

    def listener() -> None:
        told.append(threading.current_thread())
        heard.set()

    termination = Termination(60, lambda: left.append("left"))
    termination.listen(listener)
    termination.ask()
    assert heard.wait(5)
    assert (len(told), left) == (1, [])
    assert told[0] is not threading.current_thread(), "the interrupted thread may hold any lock"
    termination.ask()
    assert (len(told), left) == (1, ["left"])


def test_the_process_ends_when_the_time_is_over() -> None:
    left = threading.Event()
    termination = Termination(0.05, left.set)
    termination.listen(lambda: None)
    termination.ask()
    assert left.wait(5)
