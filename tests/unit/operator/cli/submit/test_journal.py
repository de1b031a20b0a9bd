"""What is told of a task, and that it is told once."""

from __future__ import annotations

from typing import Any

from mlora_operator.cli.submit.journal import Journal, JournalEntry


def task(*conditions: tuple[str, str, str, str], **status: Any) -> dict[str, Any]:
    held = [
        {
            "type": type_,
            "status": state,
            "reason": reason,
            "message": message,
            "lastTransitionTime": str(number),
        }
        for number, (type_, state, reason, message) in enumerate(conditions)
    ]
    return {
        "metadata": {"name": "a", "namespace": "n"},
        "spec": {},
        "status": {"conditions": held, **status} if held or status else {},
    }


def texts(entries: Any) -> list[str]:
    return [one.text for one in entries]


ACCEPTED = ("Accepted", "True", "Accepted", "served by p")
WAITS = ("Admitted", "False", "WaitingForMemory", "3 tasks are before it")
RUNS = ("Running", "True", "Training", "")


def test_each_transition_is_told_once_with_its_reason_and_words() -> None:
    journal = Journal(every=10)
    assert texts(journal.entries(task(ACCEPTED, WAITS), 0)) == [
        "a  Accepted: served by p",
        "a  not Admitted (WaitingForMemory): 3 tasks are before it",
    ]
    assert texts(journal.entries(task(ACCEPTED, WAITS), 1)) == []
    assert texts(journal.entries(task(ACCEPTED, ("Admitted", "True", "Admitted", ""), RUNS), 2)) == [
        "a  Admitted",
        "a  Running (Training)",
    ]
    unknown = ("Running", "Unknown", "CoordinatorUnreachable", "")
    assert texts(journal.entries(task(unknown), 3)) == ["a  Running? (CoordinatorUnreachable)"]


def test_a_message_that_changes_alone_is_not_told() -> None:
    journal = Journal(every=10)
    list(journal.entries(task(WAITS), 0))
    assert texts(journal.entries(task((*WAITS[:3], "2 tasks are before it")), 1)) == []


def test_that_it_has_not_ended_yet_is_no_news() -> None:
    assert (
        texts(
            Journal(10).entries(task(("Succeeded", "False", "Training", ""), ("Failed", "False", "", "")), 0)
        )
        == []
    )


def test_progress_is_told_now_and_then_and_at_the_end() -> None:
    journal = Journal(every=10)

    def at(moment: float, step: int, *conditions: tuple[str, str, str, str]) -> list[str]:
        shown = {"step": step, "totalSteps": 50, "loss": "1.5", "tokensPerSecond": "99"}
        return texts(journal.entries(task(*conditions, **shown), moment))

    assert at(0, 0) == []
    assert at(1, 1) == ["a  step 1/50, loss 1.5, 99 tokens/s"]
    assert at(2, 2) == []
    assert at(11, 30) == ["a  step 30/50, loss 1.5, 99 tokens/s"]
    assert at(12, 50, ("Succeeded", "True", "AdapterUploaded", "")) == [
        "a  Succeeded (AdapterUploaded)",
        "a  step 50/50, loss 1.5, 99 tokens/s",
    ]


def test_an_end_is_told_once_though_two_conditions_say_it() -> None:
    failed, finished = (
        ("Failed", "True", "InvalidRow", "line 3"),
        ("Finished", "True", "Failed", "InvalidRow: line 3"),
    )
    assert texts(Journal(10).entries(task(failed, finished), 0)) == ["a  Failed (InvalidRow): line 3"]


def test_programs_get_the_same_as_objects() -> None:
    (one,) = Journal(10).entries(task(("Failed", "True", "InvalidRow", "line 3")), 0)
    assert one == JournalEntry(
        "a  Failed (InvalidRow): line 3",
        {
            "type": "condition",
            "namespace": "n",
            "name": "a",
            "condition": "Failed",
            "status": "True",
            "reason": "InvalidRow",
            "message": "line 3",
        },
        bad=True,
    )
    (progress,) = Journal(10).entries(task(step=3, totalSteps=5), 0)
    assert (progress.data["type"], progress.data["step"], progress.data["totalSteps"]) == ("progress", 3, 5)


def test_a_task_that_no_operator_looks_at_is_told_once() -> None:
    journal = Journal(10)
    assert texts(journal.entries(task(), 0)) == []
    assert texts(journal.entries(task(), 29)) == []
    assert texts(journal.entries(task(), 30)) == [
        "a  no operator has processed it yet: check that one is running and watches this namespace"
    ]
    assert texts(journal.entries(task(), 99)) == []
