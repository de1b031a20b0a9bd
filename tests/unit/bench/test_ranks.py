"""What the benchmarks on real ranks read off reports, processes and sockets."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.baselines import check_first_losses
from bench.ranks import task_plans
from bench.sides import Disagreement, Setting
from bench.steady import Window, check_same_losses, processor_seconds, tokens_of
from bench.wire import between, needed_bytes, parse_sockets
from mlora_worker.data.prepare import TokenRow
from mlora_worker.data.training_rows.step_order import StepPlan
from mlora_worker.protocol import BorderShape
from tests.fixtures.toy_facts import toy_facts

# Two ranks (10, 11): data on port 5001, links on 6001, and a client (9) of the coordinator. One end is IPv6.
LISTING = """\
ESTAB 0 0 127.0.0.1:4001 127.0.0.1:5001 users:(("python",pid=10,fd=4)) cubic rtt:0.1/0.1 bytes_sent:700 bytes_acked:701
ESTAB 0 0 [::ffff:127.0.0.1]:5001 [::ffff:127.0.0.1]:4001 users:(("python",pid=11,fd=5)) cubic bytes_sent:30
ESTAB 0 0 127.0.0.1:4002 127.0.0.1:6001 users:(("python",pid=11,fd=6)) cubic bytes_sent:5000
ESTAB 0 0 127.0.0.1:6001 127.0.0.1:4002 users:(("python",pid=10,fd=7)) cubic bytes_sent:6000
ESTAB 0 0 127.0.0.1:4003 127.0.0.1:8080 users:(("python",pid=9,fd=3)) cubic bytes_sent:99
ESTAB 0 0 127.0.0.1:8080 127.0.0.1:4003 users:(("python",pid=10,fd=8)) cubic bytes_received:99
"""


def test_only_the_data_sockets_between_ranks_are_counted() -> None:
    sockets = parse_sockets(LISTING)
    assert len(sockets) == 6
    assert sorted(socket.sent for socket in between(sockets, (10, 11), (6001,))) == [30, 700]
    assert sum(socket.sent for socket in between(sockets, (10, 11), ())) == 11730


def test_a_border_needs_what_crosses_it_in_either_direction() -> None:
    facts = toy_facts(stages=2)
    assert needed_bytes(facts, 2, tokens=10) == 2 * 10 * 64 * 4
    borders = (BorderShape(forward=99, backward=64), BorderShape(forward=112, backward=96))
    assert needed_bytes(facts.model_copy(update={"borders": borders}), 2, tokens=10) == (112 + 96) * 10 * 4


def window(losses: dict[tuple[int, int], float]) -> Window:
    return Window(tokens=100, seconds=4.0, busy=(1.0,), losses=losses)


@pytest.mark.parametrize(
    ("other", "agree"),
    [({(0, 2): 1.5, (0, 3): 1.4}, True), ({(0, 2): 1.51}, False), ({(1, 2): 1.5}, False)],
    ids=["the same", "another loss", "no common step"],
)
def test_windows_must_show_the_same_losses(other: dict[tuple[int, int], float], agree: bool) -> None:
    one = window({(0, 1): 2.0, (0, 2): 1.5})
    assert one.rate == 25.0
    if agree:
        assert check_same_losses(one, window(other), 1e-3) == 1
    else:
        with pytest.raises(Disagreement):
            check_same_losses(one, window(other), 1e-3)


def test_a_peer_whose_first_loss_differs_voids_the_comparison() -> None:
    check_first_losses({"0/1": 1.0}, {"gpipe": {"0/1": 1.0005, "1/1": 3.0}})
    with pytest.raises(Disagreement, match="1f1b"):
        check_first_losses({"0/1": 1.0}, {"gpipe": {"0/1": 1.0}, "1f1b": {"0/1": 1.1}})
    with pytest.raises(Disagreement):
        check_first_losses({}, {"gpipe": {"0/1": 1.0}})


def test_tokens_of_steps_are_those_of_the_rows_that_a_worker_takes(
    make_rows: Callable[[int], list[TokenRow]], tmp_path: Path
) -> None:
    rows = make_rows(10)
    plan = task_plans(
        Setting(2, ("q_proj",)), batch=3, steps=5, learning_rate=1e-4, run="run", output=tmp_path
    )[1]
    steps = StepPlan(len(rows), plan.training)
    expected = sum(len(rows[i].ids) for step in (2, 3) for i in steps.rows_of_step(step))
    assert tokens_of(rows, plan, 2, 3) == expected


def test_tasks_differ_in_seed_and_uid_and_repetitions_in_uid(tmp_path: Path) -> None:
    first, second = (
        task_plans(Setting(2, ("q_proj",)), 1, 5, 1e-4, run, tmp_path) for run in ("run-0", "run-1")
    )
    assert len({plan.uid for plan in (*first, *second)}) == 4
    assert [plan.training for plan in first] == [plan.training for plan in second]
    assert first[0].training.seed != first[1].training.seed


def test_processor_time_grows_with_work() -> None:
    before = processor_seconds(os.getpid())
    assert before > 0
    while processor_seconds(os.getpid()) < before + 0.02:
        pass
