"""The crowd of the decisions that ``bench scheduler`` times: it must live for as long as the benchmark asks."""

from __future__ import annotations

from itertools import islice

from bench.scheduling.crowd import Crowd
from mlora_worker.protocol import TaskPhase


def test_a_crowd_never_reports_a_step_beyond_a_tasks_last() -> None:
    crowd = Crowd(1, 20, seed=1)
    (reported,) = crowd.reported
    for uid, one in reported.items():
        reported[uid] = one.model_copy(update={"phase": TaskPhase.TRAINING, "step": 2, "total_steps": 3})
    for _ in islice(crowd.live(), 5):
        crowd.snapshot()  # refused where a step is beyond its task's last
    assert max(one.step for one in reported.values() if one.total_steps == 3) == 3
