"""Which numbers of a report stand in a task's status."""

from __future__ import annotations

from mlora_operator.reconcile.status.task_progress import figures
from mlora_worker.protocol import PreferenceRecord, TaskPhase, TaskReport
from tests.fixtures.exported_metrics import task

PAIRS = PreferenceRecord(
    chosen_reward=0.5,
    rejected_reward=-0.5,
    margin=1.0,
    accuracy=0.75,
    chosen_logps=-20.0,
    rejected_logps=-30.0,
)


def test_each_figure_of_pairs_stands_in_a_field_of_its_own() -> None:
    one = task("t")
    told = TaskReport(uid=one.uid, phase=TaskPhase.TRAINING, step=2, total_steps=4, preference=PAIRS)
    found = figures(one, told, "ml/toy")
    names = ("reward_margin", "reward_accuracy", "chosen_logps", "rejected_logps")
    assert [found[name] for name in names] == ["1.0000", "0.7500", "-20.0000", "-30.0000"]


def test_what_answers_with_a_label_lack_is_absent_and_what_they_have_beside_is_there() -> None:
    one, record = task("t"), PreferenceRecord(chosen_reward=0.5, chosen_logps=-20.0, kl=0.125)
    told = TaskReport(uid=one.uid, phase=TaskPhase.TRAINING, step=2, total_steps=4, preference=record)
    found = figures(one, told, "ml/toy")
    names = ("reward_margin", "reward_accuracy", "chosen_logps", "rejected_logps", "kl")
    assert [found[name] for name in names] == [None, None, "-20.0000", None, "0.1250"]
