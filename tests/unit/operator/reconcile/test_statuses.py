"""Only differences are written, and progress not at every step."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlora_operator.api.task import TaskStatus
from mlora_operator.reconcile.statuses import difference, is_due

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("story", "before", "after", "patch"),
    [
        ("nothing", {"step": 1}, {"step": 1}, {}),
        ("a value", {"step": 1}, {"step": 2, "loss": "1.5"}, {"step": 2, "loss": "1.5"}),
        ("a removal is null", {"pipeline": "a/b"}, {}, {"pipeline": None}),
        (
            "inside an object",
            {"adapter": {"uri": "a", "sha256": "x", "bytes": 1}},
            {"adapter": {"uri": "b", "sha256": "x", "bytes": 1}},
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


@pytest.mark.parametrize(
    ("story", "patch", "seconds", "due"),
    [
        ("nothing is never due", {}, 99, False),
        ("progress, just written", {"step": 2, "loss": "1.0"}, 1, False),
        ("progress, a while ago", {"step": 2, "loss": "1.0"}, 5, True),
        ("a transition does not wait", {"step": 2, "state": "Saving"}, 0, True),
        ("the first write", {"step": 2}, None, True),
    ],
)
def test_is_due(story: str, patch: Any, seconds: float | None, due: bool) -> None:
    last = None if seconds is None else NOW - timedelta(seconds=seconds)
    assert is_due(patch, last, NOW) is due, story
