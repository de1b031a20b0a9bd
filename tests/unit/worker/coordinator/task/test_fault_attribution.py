"""Who is to blame: suspects are tried alone, one after the other, and judged together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlora_worker.coordinator.task.fault_attribution import Attribution, Charge, Trials
from mlora_worker.pipeline.faults import Fault, Phase


def fault(error: str = "ValueError: 7 is odd", *, memory: bool = False, stage: int = 0) -> Fault:
    return Fault(stage=stage, number=1, phase=Phase.FORWARD, error=error, out_of_memory=memory)


def charge(
    *, memory: bool = False, tokens: int = 100, rows: int = 4, error: str = "ValueError: odd"
) -> Charge:
    return Charge(fault(error, memory=memory), tokens, rows)


def test_nobody_is_accused_so_there_is_nothing_to_say() -> None:
    assert (Trials().next, Trials().verdict()) == (None, None)


def test_suspects_are_tried_in_the_order_in_which_they_were_accused_and_the_guilty_one_is_found() -> None:
    trials = Trials()
    for task in ("a", "b", "c"):
        assert trials.accuse(task, charge()) is None
    seen = []
    while trials.next is not None:
        assert trials.verdict() is None, "not before all have been tried"
        seen.append(trials.next)
        if trials.next == "b":
            trials.accuse("b", charge(error="ValueError: the same again"))
        else:
            trials.clear(trials.next)
    assert seen == ["a", "b", "c"]
    assert trials.verdict() == Attribution(convicted={"b": fault("ValueError: the same again")})
    assert trials.verdict() is None, "once only"


def test_a_fault_that_does_not_come_again_is_nobodys() -> None:
    trials = Trials()
    trials.accuse("a", charge())
    trials.clear("a")
    assert trials.verdict() == Attribution()


def test_memory_is_tried_with_ever_narrower_microbatches_down_to_a_row() -> None:
    trials = Trials()
    assert trials.accuse("a", charge(memory=True, tokens=400, rows=9)) is None, "first alone, as it is"
    assert trials.accuse("a", charge(memory=True, tokens=400, rows=9)) == 200
    assert trials.accuse("a", charge(memory=True, tokens=180, rows=2)) == 90
    assert trials.next == "a"
    assert trials.accuse("a", charge(memory=True, tokens=95, rows=1)) is None
    verdict = trials.verdict()
    assert verdict is not None
    assert verdict.convicted.keys() == {"a"}


def test_a_microbatch_that_was_too_wide_narrows_those_who_shared_it_when_all_pass_alone() -> None:
    trials = Trials()
    for task in ("a", "b"):
        trials.accuse(task, charge(memory=True, tokens=400))
    trials.clear("a")
    trials.clear("b")
    assert trials.verdict() == Attribution(narrowed={"a": 200, "b": 200})


def test_when_one_took_the_memory_the_others_keep_their_width() -> None:
    trials = Trials()
    for task in ("a", "b"):
        trials.accuse(task, charge(memory=True, tokens=400))
    trials.clear("a")
    trials.accuse("b", charge(memory=True, rows=1))
    assert trials.verdict() == Attribution(convicted={"b": fault("ValueError: odd", memory=True)})


@pytest.mark.parametrize(
    ("story", "faults", "cleared", "pipelines"),
    [
        ("the same error of all", ["KeyError: 'x'", "KeyError: 'y'"], [], True),
        ("a task alone cannot accuse the pipeline", ["KeyError: 'x'"], [], False),
        ("one passes", ["KeyError: 'x'", "KeyError: 'x'"], ["c"], False),
        ("different errors", ["KeyError: 'x'", "ValueError: x"], [], False),
    ],
)
def test_an_error_that_all_meet_is_the_pipelines(
    story: str, faults: list[str], cleared: list[str], pipelines: bool
) -> None:
    trials = Trials()
    tasks = dict(zip("ab", faults, strict=False))
    for task in (*tasks, *cleared):
        trials.accuse(task, charge())
    for task, error in tasks.items():
        trials.accuse(task, charge(error=error))
    for task in cleared:
        trials.clear(task)
    verdict = trials.verdict()
    assert verdict is not None
    assert (verdict.pipeline is not None) is pipelines, story
    assert verdict.convicted.keys() == (set() if pipelines else tasks.keys())


@pytest.mark.parametrize(
    ("story", "again", "convicted", "pipelines"),
    [
        ("the witness passes", [], {"a"}, False),
        ("a fault of the witness that passes", ["KeyError: 'y'"], {"a"}, False),
        ("the witness meets the same", ["KeyError: 'y'", "KeyError: 'z'"], set(), True),
        ("the witness has a fault of its own", ["OSError", "OSError"], {"a", "w"}, False),
    ],
)
def test_a_task_that_is_convicted_alone_has_a_witness(
    story: str, again: list[str], convicted: set[str], pipelines: bool
) -> None:
    trials = Trials()
    for _ in range(2):
        trials.accuse("a", charge(error="KeyError: 'x'"))
    assert trials.verdict(["a", "w"]) is None
    for error in again:
        assert trials.next == "w"
        trials.accuse("w", charge(error=error))
    if len(again) < 2:
        trials.clear("w")
    verdict = trials.verdict(["a", "w"])
    assert verdict is not None, story
    assert (verdict.convicted.keys(), verdict.pipeline is not None) == (convicted, pipelines), story


def test_a_witness_that_leaves_is_replaced_and_none_is_asked_about_memory() -> None:
    trials = Trials()
    for _ in range(2):
        trials.accuse("a", charge())
    assert trials.verdict(["w", "v"]) is None
    trials.drop("w")
    assert trials.verdict(["v"]) is None
    assert trials.next == "v"
    other = Trials()
    for _ in range(2):
        other.accuse("a", charge(memory=True, rows=1))
    verdict = other.verdict(["w"])
    assert verdict is not None
    assert verdict.convicted.keys() == {"a"}


def test_memory_that_lacks_for_all_fails_them_and_not_the_pipeline() -> None:
    trials = Trials()
    for task in ("a", "b"):
        trials.accuse(task, charge(memory=True))
    for task in ("a", "b"):
        trials.accuse(task, charge(memory=True, rows=1))
    verdict = trials.verdict()
    assert verdict is not None
    assert (verdict.convicted.keys(), verdict.pipeline) == ({"a", "b"}, None)


def test_a_task_that_leaves_is_forgotten() -> None:
    trials = Trials()
    trials.accuse("a", charge())
    trials.accuse("b", charge())
    trials.drop("a")
    assert trials.next == "b"
    trials.drop("b")
    assert trials.verdict() is None


@given(
    st.lists(
        st.tuples(st.sampled_from("abcd"), st.sampled_from(["fault", "memory", "row", "whole", "leave"])),
        max_size=60,
    )
)
def test_whatever_comes_back_a_case_ends_and_blames_only_who_failed_again(
    events: list[tuple[str, str]],
) -> None:
    trials = Trials()
    accused: set[str] = set()
    again: set[str] = set()
    for task, event in events:
        if event == "whole":
            trials.clear(task)
        elif event == "leave":
            trials.drop(task)
            accused.discard(task)
            again.discard(task)
        elif task not in again:  # the convicted do not step before the verdict
            (again if task in accused and trials.next is not None else accused).add(task)
            trials.accuse(task, charge(memory=event != "fault", rows=1 if event == "row" else 3))
        verdict = trials.verdict()
        if verdict is not None:
            assert trials.next is None
            assert verdict.convicted.keys() <= accused | again
            accused, again = set(), set()
    for _ in range(10):
        if trials.next is not None:
            trials.clear(trials.next)
    assert trials.next is None


def test_memory_that_runs_out_again_after_a_narrowing_means_that_the_pipeline_is_too_full() -> None:
    trials = Trials()

    def ran_out(rows: int) -> Attribution | None:
        for task in ("a", "b"):
            trials.accuse(task, Charge(fault(memory=True), tokens=100, rows=rows))
        for task in ("a", "b"):
            trials.clear(task)
        return trials.verdict()

    first, second = ran_out(4), ran_out(2)
    assert first is not None
    assert (first.narrowed, first.full) == ({"a": 50, "b": 50}, None)
    assert second is not None
    assert (second.narrowed, second.accused) == ({}, ("a", "b"))
    assert second.full is not None


def test_single_rows_cannot_be_narrowed_so_the_pipeline_is_too_full_at_once() -> None:
    trials = Trials()
    trials.accuse("a", Charge(fault(memory=True), tokens=100, rows=1))
    trials.clear("a")
    verdict = trials.verdict()
    assert verdict is not None
    assert verdict.full is not None


def test_a_made_up_witness_is_called_where_nobody_else_can_be_one_and_is_never_convicted() -> None:
    trials = Trials()
    for task in ("a", "b"):
        trials.accuse(task, charge())
    for task in ("a", "b"):
        trials.accuse(task, charge())
    assert trials.verdict((), "made up") is None
    assert trials.next == "made up"
    trials.accuse("made up", charge(memory=True, error="OutOfMemoryError: x"))
    trials.accuse("made up", charge(memory=True, rows=1, error="OutOfMemoryError: x"))
    verdict = trials.verdict((), "made up")
    assert verdict is not None
    assert verdict.pipeline is None
    assert verdict.convicted.keys() == {"a", "b"}


def test_one_task_that_fails_alone_needs_no_made_up_witness() -> None:
    trials = Trials()
    for _ in range(2):
        trials.accuse("a", charge())
    assert trials.verdict((), "made up") == Attribution(convicted={"a": fault("ValueError: odd")})
