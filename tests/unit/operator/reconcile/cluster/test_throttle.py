"""Only differences are written, and progress not at every step."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlora_operator.api.meta import Condition
from mlora_operator.api.task import TaskStatus
from mlora_operator.reconcile.cluster.throttle import API_SERVER, PROMPT, difference, pause


@pytest.mark.parametrize(
    ("story", "before", "after", "patch"),
    [
        ("nothing", {"step": 1}, {"step": 1}, {}),
        ("a value", {"step": 1}, {"step": 2, "loss": "1.5"}, {"step": 2, "loss": "1.5"}),
        ("a removal is null", {"pipeline": "a/b"}, {}, {"pipeline": None}),
        (
            "inside an object",
            {"adapter": {"uri": "a", "sha256": "0" * 64, "bytes": 1}},
            {"adapter": {"uri": "b", "sha256": "0" * 64, "bytes": 1}},
            {"adapter": {"uri": "b"}},
        ),
    ],
)
def test_difference(story: str, before: Any, after: Any, patch: Any) -> None:
    found = difference(TaskStatus.model_validate(before), TaskStatus.model_validate(after))
    assert found == patch, story


statuses = st.builds(
    TaskStatus,
    step=st.none() | st.integers(0, 3),
    loss=st.none() | st.sampled_from(["1.0", "2.0"]),
    state=st.none() | st.sampled_from(["Training", "Saving"]),
)


@given(statuses, statuses)
def test_a_patch_turns_one_status_into_the_other(before: TaskStatus, after: TaskStatus) -> None:
    document = before.model_dump(mode="json", by_alias=True, exclude_none=True)
    for name, value in difference(before, after).items():
        if value is None:
            document.pop(name)
        else:
            document[name] = value
    assert TaskStatus.model_validate(document) == after


def held(*conditions: tuple[str, str, str, str]) -> tuple[Condition, ...]:
    """From (type, status, reason, message)."""
    return tuple(
        Condition(type=type_, status=status, reason=reason, message=message, last_transition_time="")
        for type_, status, reason, message in conditions
    )


PREPARES = ("Admitted", "False", "PreparingData", "")
WAITS = ("Admitted", "False", "WaitingForMemory", "")
WAITS_STILL = ("Admitted", "False", "WaitingForMemory", "for somebody else")
HAS_A_PLACE = ("Admitted", "True", "Admitted", "")
SECOND = timedelta(seconds=1)


@pytest.mark.parametrize(
    ("story", "before", "after", "fields", "seconds"),
    [
        ("numbers", [HAS_A_PLACE], [HAS_A_PLACE], {"step": 2, "loss": "1.0"}, 5),
        (
            "numbers of pairs",
            [HAS_A_PLACE],
            [HAS_A_PLACE],
            {"rewardMargin": "0.5", "rewardAccuracy": "1.0", "chosenLogps": "-1.0", "rejectedLogps": "-2.0"},
            5,
        ),
        ("a condition comes", [], [PREPARES], {"state": "Preparing"}, 0),
        ("a condition goes", [PREPARES], [], {}, 0),
        ("a condition turns", [HAS_A_PLACE], [WAITS], {"state": "Queued"}, 0),
        ("another reason", [PREPARES], [WAITS], {"state": "Queued"}, 2),
        ("a place", [WAITS], [HAS_A_PLACE], {"reason": "Admitted"}, 2),
        (
            "a place and what follows",
            [WAITS],
            [HAS_A_PLACE, ("Running", "True", "Training", "")],
            {"run": "1"},
            0,
        ),
        ("the end", [HAS_A_PLACE], [("Admitted", "False", "Finished", "")], {"state": "Succeeded"}, 0),
        ("other words of one in a queue", [WAITS], [WAITS_STILL], {}, 60),
        ("other words of one that waits for pods", [PREPARES], [(*PREPARES[:3], "more")], {}, 2),
        ("another state with them", [WAITS], [WAITS_STILL], {"state": "Preempted"}, 2),
        ("a new spec", [WAITS], [WAITS_STILL], {"observedGeneration": 2}, 0),
    ],
)
def test_what_turns_is_written_at_once_and_what_will_be_overtaken_waits(
    story: str, before: Any, after: Any, fields: dict[str, Any], seconds: float
) -> None:
    patch = fields if before == after else {"conditions": [], **fields}
    found = pause(patch, held(*before), held(*after), timedelta(0), API_SERVER)
    assert found == seconds * SECOND, story


@pytest.mark.parametrize(("trained", "seconds"), [(0, 5), (50, 5), (100, 10), (299, 29.9), (36_000, 30)])
def test_the_longer_a_task_has_trained_the_less_often_its_numbers_are_written(
    trained: float, seconds: float
) -> None:
    assert pause({"step": 9}, (), (), trained * SECOND, API_SERVER) == seconds * SECOND


def test_where_a_write_costs_nothing_only_numbers_wait() -> None:
    assert pause({"conditions": []}, held(WAITS), held(WAITS_STILL), 0 * SECOND, PROMPT) == 0 * SECOND
    assert pause({"step": 9}, (), (), 36_000 * SECOND, PROMPT) == 5 * SECOND
