"""Events tell what changed, once."""

from __future__ import annotations

from typing import Any

import pytest

from mlora_operator.reconcile.decide import decide
from mlora_operator.reconcile.state.snapshot import Contact, Key
from mlora_operator.reconcile.status.conditions import DesiredCondition, conclude, news


def told(
    make: Any, before: list[tuple[str, str, str]], after: list[tuple[str, str, str]]
) -> list[tuple[str, str]]:
    held = conclude((), [DesiredCondition(*one) for one in before], 1, make.now)  # type: ignore[arg-type]
    wished = conclude(held, [DesiredCondition(*one) for one in after], 1, make.now)  # type: ignore[arg-type]
    return [(event.type, event.reason) for event in news("LoRATask", Key("a", "b"), "uid", held, wished)]


@pytest.mark.parametrize(
    ("story", "before", "after", "expected"),
    [
        ("accepted", [], [("Accepted", "True", "Accepted")], [("Normal", "Accepted")]),
        ("refused", [], [("Accepted", "False", "SecretNotFound")], [("Warning", "SecretNotFound")]),
        (
            "the reason alone changed",
            [("Accepted", "False", "SecretNotFound")],
            [("Accepted", "False", "SecretIncomplete")],
            [("Warning", "SecretIncomplete")],
        ),
        ("nothing changed", [("Failed", "True", "InvalidRow")], [("Failed", "True", "InvalidRow")], []),
        ("waiting is no news", [], [("Admitted", "False", "PipelineStarting")], []),
        ("too large is", [], [("Admitted", "False", "ExceedsCapacity")], [("Warning", "ExceedsCapacity")]),
        (
            "a restart",
            [("Running", "True", "Training")],
            [("Running", "False", "Restarting")],
            [("Warning", "Restarting")],
        ),
        (
            "the end of a success is told once",
            [("Running", "True", "Saving")],
            [
                ("Running", "False", "Finished"),
                ("Succeeded", "True", "AdapterUploaded"),
                ("Failed", "False", "X"),
            ],
            [("Normal", "AdapterUploaded")],
        ),
    ],
)
def test_news(make: Any, story: str, before: Any, after: Any, expected: Any) -> None:
    assert told(make, before, after) == expected, story


def test_a_long_message_is_cut_to_what_the_schema_takes(make: Any) -> None:
    (condition,) = conclude((), [DesiredCondition("Failed", "True", "InvalidRow", "x" * 9999)], 1, make.now)
    assert len(condition.message) == 4096


def test_a_second_look_at_the_same_world_tells_nothing(make: Any) -> None:
    contact = Contact(report=make.report(make.reported("Training")))
    first = decide(make.snapshot(make.task(), group=make.group(), contact=contact), make.settings(), make.now)
    status = first.task_statuses[Key("team-a", "t1")].model_dump(
        mode="json", by_alias=True, exclude_none=True
    )
    pipeline = first.pipeline_statuses[Key("team-a", "toy")].model_dump(
        mode="json", by_alias=True, exclude_none=True
    )
    again = make.snapshot(
        make.task(status=status),
        pipelines=(make.pipeline(status=pipeline),),
        group=make.group(),
        contact=contact,
    )
    second = decide(again, make.settings(), make.now)
    assert first.events != ()
    assert second.events == ()
    assert second.task_statuses[Key("team-a", "t1")] == first.task_statuses[Key("team-a", "t1")]
