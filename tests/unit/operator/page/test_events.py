"""What happened to tasks stays in memory: the newest of each, told once, whatever comes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from mlora_operator.page.events import EVENTS, MESSAGE_KEPT, SAME_WITHIN, TASKS, TaskEvents
from mlora_operator.reconcile.state.decision import Event
from mlora_operator.reconcile.state.snapshot import Key

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)


def event(reason: str, uid: str = "u", message: str = "") -> Event:
    return Event("LoRATask", Key("n", uid), uid, "Normal", reason, message)


def test_the_newest_of_a_task_are_kept_and_the_oldest_comes_first() -> None:
    events = TaskEvents()
    for number in range(EVENTS + 3):
        events.note(event(f"r{number}"), NOW)
    assert [one.reason for one in events.of("u")] == [f"r{number}" for number in range(3, EVENTS + 3)]
    assert events.of("nobody") == ()


def test_one_that_is_decided_again_because_its_write_failed_is_told_once() -> None:
    events = TaskEvents()
    for second in (0, 1, 2):
        for reason in ("Admitted", "Running"):
            events.note(event(reason), NOW + timedelta(seconds=second))
    assert [one.reason for one in events.of("u")] == ["Admitted", "Running"]
    events.note(event("Admitted"), NOW + SAME_WITHIN)
    assert [one.reason for one in events.of("u")] == ["Admitted", "Running", "Admitted"]


def test_those_of_whom_nothing_was_heard_for_longest_go_first() -> None:
    events = TaskEvents()
    for number in range(TASKS):
        events.note(event("r", f"u{number}"), NOW)
    events.note(event("again", "u0"), NOW)
    events.note(event("r", "new"), NOW)
    assert events.of("u1") == ()
    assert len(events.of("u0")) == 2
    assert len(events._kept) == TASKS


def test_a_long_message_is_cut_and_pipelines_have_none() -> None:
    events = TaskEvents()
    events.note(event("r", message="x" * 100_000), NOW)
    events.note(Event("LoRAPipeline", Key("n", "p"), "p", "Normal", "r", ""), NOW)
    assert len(events.of("u")[0].message) == MESSAGE_KEPT
    assert events.of("p") == ()
