"""What counts as progress, and since when tasks stand still."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from mlora_operator.coordinator.progress import by_another_clock, heard
from mlora_operator.reconcile.state.snapshot import Contact
from mlora_worker.protocol import Failure, FailureReason, Report, WireReport

MINUTE = timedelta(minutes=1)


def report(make: Any, microbatches: int, *tasks: Any, run: str = "run-1") -> Report:
    found: Report = make.report(*tasks, run=run)
    return found.model_copy(update={"wire": WireReport(microbatches=microbatches)})


@pytest.mark.parametrize(
    ("story", "microbatches", "after", "moved"),
    [
        ("nothing", 5, [("Training", "t1", 3)], False),
        ("one more microbatch of a long step", 6, [("Training", "t1", 3)], True),
        ("a step", 5, [("Training", "t1", 4)], True),
        ("its training is over", 5, [("Saving", "t1", 3)], True),
        ("another task comes and is stuck too", 5, [("Training", "t1", 3), ("Training", "t2", 0)], False),
        ("another task is prepared", 5, [("Training", "t1", 3), ("Prepared", "t2", 0)], False),
    ],
)
def test_progress_is_work_that_was_done(
    make: Any, story: str, microbatches: int, after: list[tuple[str, str, int]], moved: bool
) -> None:
    before = heard(Contact(), report(make, 5, make.reported("Training", "t1", step=3)), make.now)
    tasks = [make.reported(phase, name, step=step) for phase, name, step in after]
    contact = heard(before, report(make, microbatches, *tasks), make.now + MINUTE)
    assert contact.progressed == (make.now + MINUTE if moved else None), story
    if any(phase == "Training" for phase, _, _ in after):
        assert contact.still_since == (make.now + MINUTE if moved else make.now), story


def test_what_a_report_repeats_is_kept_as_the_same_object(make: Any) -> None:
    def told(step: int) -> Report:
        tasks = [make.reported("Training", "t1", step=step), make.reported("Prepared", "t2")]
        return Report.model_validate_json(report(make, step, *tasks).to_json())

    first = heard(Contact(), told(3), make.now).report
    assert first is not None
    assert first.facts is not None
    second = heard(Contact(report=first), told(4), make.now).report
    assert second is not None
    assert second == told(4)
    assert second.tasks[1] is first.tasks[1]
    assert second.facts is first.facts
    assert second.stages is first.stages


def test_who_does_not_train_does_not_stand_still(make: Any) -> None:
    idle = heard(Contact(), report(make, 5, make.reported("Prepared")), make.now)
    assert idle.still_since is None
    later = make.now + 60 * MINUTE
    assert heard(idle, report(make, 5, make.reported("Training")), later).still_since == later


def test_a_new_run_has_its_own_time(make: Any) -> None:
    stuck = heard(Contact(), report(make, 5, make.reported("Training", step=3)), make.now)
    fresh = report(make, 0, make.reported("Training", step=2), run="run-2")
    contact = heard(stuck, fresh, make.now + MINUTE)
    assert (contact.still_since, contact.progressed) == (make.now + MINUTE, None)


@pytest.mark.parametrize(("phase", "microbatches"), [("Training", 9), ("Preparing", 0)])
def test_what_a_new_run_counts_and_takes_up_again_is_no_progress(
    make: Any, phase: str, microbatches: int
) -> None:
    """Else a group that dies in every run would seem to move, and its failures would be forgotten."""
    stuck = heard(Contact(), report(make, 5, make.reported("Training", step=3)), make.now)
    fresh = report(make, microbatches, make.reported(phase, step=3), run="run-2")
    assert heard(stuck, fresh, make.now + MINUTE).progressed is None


def test_a_moment_without_an_answer_stops_no_clock(make: Any) -> None:
    stuck = heard(Contact(), report(make, 5, make.reported("Training", step=3)), make.now)
    lost = Contact(
        report=stuck.report, lost_since=make.now + MINUTE, error="refused", still_since=stuck.still_since
    )
    contact = heard(lost, report(make, 5, make.reported("Training", step=3)), make.now + 2 * MINUTE)
    assert contact.still_since == make.now
    assert (contact.lost_since, contact.error) == (None, None)


def test_a_task_that_waits_for_its_store_is_not_stuck(make: Any) -> None:
    refusal = Failure(reason=FailureReason.STORAGE_UNREACHABLE, message="no answer")
    waiting = make.reported("Training", step=3, blocked=refusal)
    assert heard(Contact(), report(make, 5, waiting), make.now).still_since is None


def test_after_a_jump_of_the_clock_what_lasts_begins_anew_and_nothing_begins(make: Any) -> None:
    later = make.now + timedelta(hours=1)
    assert by_another_clock(Contact(), later) == Contact()
    before = Contact(lost_since=make.now, error="away", still_since=make.now, progressed=make.now)
    assert by_another_clock(before, later) == Contact(lost_since=later, error="away", still_since=later)
