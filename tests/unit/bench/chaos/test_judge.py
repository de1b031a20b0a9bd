"""What a fault cost, and what counts as a duplicate."""

from __future__ import annotations

import pytest

from bench.chaos_parts.judge import Cost, Place, duplicates, places, redone, resumed
from bench.chaos_parts.weather import Deed


def cost(step: int, stored: int, at: int, kind: str = "kill_rank") -> Cost:
    return Cost(1, kind, "a", Place(step, stored), at)


@pytest.mark.parametrize(
    ("step", "stored", "at", "steps", "writing"),
    [
        (74, 50, 50, 25, False),
        (99, 50, 50, 50, False),  # the most that there can be: 49 came back, one was on its way
        (100, 50, 50, 51, True),  # the checkpoint of step 100 is due
        (103, 100, 100, 4, False),
        (103, 50, 100, 4, True),  # it got to the store just so
        (20, 0, 0, 21, False),
        (50, 50, 50, 1, False),
    ],
)
def test_the_step_under_way_counts_as_redone(
    step: int, stored: int, at: int, steps: int, writing: bool
) -> None:
    one = cost(step, stored, at)
    assert (one.redone, one.was_writing(50)) == (steps, writing)


def test_a_drain_gives_no_step_up_and_is_counted_apart() -> None:
    found = redone([cost(74, 50, 74, "drain_rank"), cost(60, 50, 50), cost(101, 50, 50)], 50)
    assert (found.usual, found.writing, found.orderly) == (11, 52, 0)
    assert redone([cost(74, 50, 73, "drain_coordinator")], 50).orderly == 1


def test_to_go_on_from_an_older_checkpoint_than_there_was_is_told() -> None:
    assert redone([cost(120, 100, 50), cost(120, 100, 100)], 50).forgotten == 1


def test_only_tasks_with_steps_to_lose_have_a_place() -> None:
    report = {
        "tasks": [
            {"uid": "a", "phase": "Training", "step": 7, "checkpointStep": 5},
            {"uid": "b", "phase": "Saving", "step": 9},
            {"uid": "c", "phase": "Prepared", "step": 0},
            {"uid": "d", "phase": "Succeeded", "step": 9},
        ]
    }
    assert places(report) == {"a": Place(7, 5), "b": Place(9, 0)}


def test_where_tasks_went_on_is_told_once_they_train() -> None:
    report = {
        "tasks": [
            {"uid": "a", "phase": "Training", "step": 7, "totalSteps": 9, "resumedStep": 5},
            {"uid": "b", "phase": "Training", "step": 1, "totalSteps": 9},
            {"uid": "c", "phase": "Prepared", "step": 0, "totalSteps": 9},
            {"uid": "d", "phase": "Succeeded", "step": 0, "totalSteps": 0},  # found published
            {"uid": "e", "phase": "Succeeded", "step": 9, "totalSteps": 9, "resumedStep": 8},
            {"uid": "f", "phase": "Saving", "step": 9, "totalSteps": 0, "resumedStep": 9},  # found finished
        ]
    }
    assert resumed(report) == {"a": 5, "b": 0, "d": None, "e": 8, "f": None}


def deed(method: str, name: str, sha256: str = "1") -> Deed:
    return Deed(0.0, method, f"adapters/chaos/one/{name}", sha256)


@pytest.mark.parametrize(
    ("after", "count"),
    [
        ([], 0),
        ([deed("PUT", "manifest.json")], 0),  # the SDK asked again
        ([deed("PUT", "manifest.json", "2")], 1),
        ([deed("DELETE", "manifest.json"), deed("PUT", "manifest.json")], 1),
        ([deed("PUT", "adapter_model.safetensors")], 1),
        ([Deed(0.0, "PUT", "adapters/chaos/two/adapter_model.safetensors", "1")], 0),
    ],
)
def test_what_comes_after_publication_is_a_duplicate(after: list[Deed], count: int) -> None:
    published = [
        deed("DELETE", "manifest.json"),
        deed("PUT", "adapter_model.safetensors"),
        deed("PUT", "manifest.json"),
    ]
    assert len(duplicates([*published, *after])) == count
