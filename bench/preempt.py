"""``python -m bench preempt``: how long a task of high priority waits for the place of another one.

Two real ranks train two tasks. Then the plan takes one of them out, as the operator does for a task of higher priority, and
lets that one in as soon as the report says that the place is free. Counted are the steps of the task that stays, from the
plan until the urgent one trains: the victim ends its step and writes its checkpoint meanwhile, and the pipeline is not
flushed. Once the urgent one is done, the victim comes back and ends.

The same two tasks train once more undisturbed. Every loss that both runs showed must agree: of the task that stayed, and of
the one that had to leave. Otherwise the run ends with an error.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.base import cut_folder, smollm2_folder
from bench.options import parser, repetitions
from bench.ranks import Ranks, task_plans
from bench.report import last_line, table
from bench.sides import LEARNING_RATE, Disagreement, Setting
from mlora_worker.protocol import Report, TaskPhase, TaskPlan

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
STAGES, BATCH = 2, 2
TOLERANCE = 1e-5  # relative; neighbours change which rows share a product, not what it is
BEFORE = 2  # steps of the task that stays, before the urgent one comes
Losses = dict[tuple[str, int], float]  # (role, step) -> mean loss


@dataclass
class Story:
    """What the reports of one run tell."""

    losses: Losses = field(default_factory=dict)

    def hear(self, report: Report) -> dict[str, tuple[TaskPhase, int]]:
        """Phase and step of each task, by role."""
        seen = {}
        for task in report.tasks:
            role = task.uid.rpartition("-")[2]
            seen[role] = (task.phase, task.step)
            if task.step and task.loss is not None:
                self.losses[role, task.step] = task.loss
        return seen


@dataclass(frozen=True)
class Waited:
    """``steps`` of the task that stays; ``seconds`` until the place was free, and until the urgent one trained."""

    steps: int
    free: float
    trains: float


def main(arguments: list[str]) -> int:
    options = parser("preempt", __doc__).parse_args(arguments)
    count = repetitions(options, usual=3, long=9)
    steps = 6 if options.quick else 8
    setting = Setting(3, TARGETS)
    waited: list[Waited] = []
    compared = 0
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        folder = cut_folder(smollm2_folder(), 2, scratch / "model") if options.quick else smollm2_folder()
        with Ranks(folder, STAGES, scratch / "ranks", options.threads) as ranks:
            still = undisturbed(ranks, plans(setting, steps, "still", scratch))
            for repetition in range(count):
                told = Story()
                waited.append(disturbed(ranks, plans(setting, steps, f"run{repetition}", scratch), told))
                compared += agree(still.losses, told.losses)
                print(
                    f"repetition {repetition + 1}: {waited[-1].steps} steps, free after {waited[-1].free:.2f} s"
                )
    rows = [
        ["steps of the others", *[one.steps for one in waited]],
        ["seconds until the place was free", *[one.free for one in waited]],
        ["seconds until the first microbatch", *[one.trains for one in waited]],
    ]
    print(table(["from the plan", *[f"run {number + 1}" for number in range(count)]], rows))
    print(f"{compared} losses agree with the undisturbed run's")
    result = {
        "steps_waited": max(one.steps for one in waited),
        "seconds_free": statistics.median(one.free for one in waited),
        "seconds_trains": statistics.median(one.trains for one in waited),
        "losses_compared": compared,
        "stages": STAGES,
    }
    print(last_line("preempt", result, repetitions=count, threads=options.threads, quick=options.quick))
    return 0


def plans(setting: Setting, steps: int, run: str, scratch: Path) -> dict[str, TaskPlan]:
    """By role: who stays, the victim, the urgent one. Uids end with the role; seeds do not depend on the run."""
    made = task_plans(setting, BATCH, steps, LEARNING_RATE, run, scratch)
    roles = ("stays", "victim", "urgent")
    return {
        role: plan.model_copy(update={"uid": f"{run}-{role}"}) for role, plan in zip(roles, made, strict=True)
    }


def undisturbed(ranks: Ranks, tasks: dict[str, TaskPlan]) -> Story:
    """The losses of the two when nobody comes."""
    told = Story()
    two = [tasks["stays"], tasks["victim"]]
    start_together(ranks, two)
    for _, report in ranks.reports():
        if all(phase is TaskPhase.SUCCEEDED for phase, _ in told.hear(report).values()):
            break
    clear(ranks)
    return told


def disturbed(ranks: Ranks, tasks: dict[str, TaskPlan], told: Story) -> Waited:
    """The urgent one is prepared from the beginning, as a waiting task is."""
    stays, victim, urgent = tasks["stays"], tasks["victim"], tasks["urgent"]
    outside = {"admitted": False}
    start_together(ranks, [stays, victim], waiting=[urgent])
    for _, report in ranks.reports():
        if told.hear(report)["stays"][1] >= BEFORE:
            break
    asked, at_first = time.perf_counter(), told.hear(report)["stays"][1]
    ranks.plan([stays, victim.model_copy(update=outside), urgent.model_copy(update=outside)])
    free, trains, last = None, None, at_first
    for came, report in ranks.reports():
        seen = told.hear(report)
        if free is None and seen["victim"][0] is TaskPhase.PREEMPTED:
            free = came - asked
            ranks.plan([stays, victim.model_copy(update=outside), urgent])
        if free is not None and seen["urgent"][0] is TaskPhase.TRAINING:
            trains, last = came - asked, seen["stays"][1]
            break
    assert free is not None
    assert trains is not None
    for _, report in ranks.reports():
        if told.hear(report)["urgent"][0] is TaskPhase.SUCCEEDED:
            break
    ranks.plan([stays, victim, urgent])
    for _, report in ranks.reports():
        if all(phase is TaskPhase.SUCCEEDED for phase, _ in told.hear(report).values()):
            break
    clear(ranks)
    return Waited(last - at_first, free, trains)


def start_together(ranks: Ranks, tasks: Sequence[TaskPlan], waiting: Sequence[TaskPlan] = ()) -> None:
    """Let ``tasks`` in once all rows are prepared."""
    everyone = [plan.model_copy(update={"admitted": False}) for plan in (*tasks, *waiting)]
    ranks.plan(everyone)
    ranks.wait_for(
        lambda report: (
            len(report.tasks) == len(everyone)
            and all(task.phase is TaskPhase.PREPARED for task in report.tasks)
        )
    )
    ranks.plan([*tasks, *everyone[len(tasks) :]])


def clear(ranks: Ranks) -> None:
    ranks.plan([])
    ranks.wait_for(lambda report: not report.tasks)


def agree(still: Losses, disturbed: Losses) -> int:
    """How many losses both have. Raises Disagreement."""
    common = sorted(still.keys() & disturbed.keys())
    for key in common:
        a, b = still[key], disturbed[key]
        if not abs(a - b) <= TOLERANCE * abs(a):
            raise Disagreement(f"step {key[1]} of the task that {key[0]}: loss {a:.7f} alone, {b:.7f} here")
    if not common:
        raise Disagreement("no step's loss was seen in both runs")
    return len(common)
