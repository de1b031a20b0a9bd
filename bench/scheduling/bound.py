"""The least time in which tasks can be done on one pipeline, whatever the schedule: a mixed-integer program.

A schedule is a number of rounds ``r_S`` for each set ``S`` of tasks that fit together; a round takes ``seconds(S)`` and
gives each task in it one step. So

    minimise    sum over S of seconds(S) r_S
    subject to  sum over S with j in S of r_S = steps of j, for each task j        r_S >= 0, whole

No schedule is shorter, not even one that changes its tasks after every round at no cost: the order of the rounds does not
enter. All tasks are there from the beginning. The number of sets grows as 2 to the number of tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations

import numpy as np
from scipy.optimize import LinearConstraint, milp

from bench.scheduling.simulate import SimMemory, SimTask

SECONDS = 20.0  # for the solver; its bound holds also when it is stopped


def least_makespan(
    tasks: Sequence[SimTask], memory: SimMemory, seconds: Callable[[Sequence[int]], float]
) -> tuple[float, bool]:
    """Seconds, as the solver (HiGHS) proves, and whether it found a schedule of rounds that takes no longer. ``seconds``:
    of a round, by the tokens of its steps."""
    sets = [
        chosen
        for size in range(1, len(tasks) + 1)
        for chosen in combinations(range(len(tasks)), size)
        if memory.fits(memory.held(tasks[one].uid for one in chosen))
    ]
    costs = np.array([seconds([tasks[one].step_tokens for one in chosen]) for chosen in sets])
    taking_part = np.zeros((len(tasks), len(sets)))
    for column, chosen in enumerate(sets):
        taking_part[list(chosen), column] = 1
    steps = np.array([task.steps for task in tasks], dtype=float)
    result = milp(
        costs,
        constraints=LinearConstraint(taking_part, steps, steps),
        integrality=np.ones(len(sets)),
        options={"time_limit": SECONDS},
    )
    return float(result.mip_dual_bound), bool(result.status == 0)
