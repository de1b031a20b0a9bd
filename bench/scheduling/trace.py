"""A synthetic trace: tasks of several tenants, drawn from a seed. No real cluster's trace is behind it."""

from __future__ import annotations

import math
import random

from bench.scheduling.pace import Gpus
from bench.scheduling.simulate import SimTask

BUDGET = 1000  # thousandths of what a stage has beside the frozen weights
STEP_TOKENS = (512, 1024, 2048, 4096, 8192)
_OWN = {512: 15, 1024: 30, 2048: 60, 4096: 110, 8192: 200}  # thousandths, with the activations of a step
_LARGER = (1, 1, 1, 1.5, 2.4)  # adapters of higher rank, longer rows
TENANTS = {"research": 0.45, "search": 0.25, "support": 0.2, "legal": 0.1}  # part of the tasks
PRIORITIES = ((0, 0.8), (5, 0.15), (10, 0.05))


def trace(tasks: int, seed: int, gpus: Gpus, load: float) -> list[SimTask]:
    """``load``: work that arrives, as part of what the GPUs could train without launches and bubbles. Arrivals come in
    waves (a day of eight hours' period), lengths are log-normal: many short tasks, a few very long ones.
    """
    rng = random.Random(seed)
    drawn = [
        (
            rng.choices(STEP_TOKENS, (2, 3, 3, 2, 1))[0],
            max(10, min(20_000, round(rng.lognormvariate(math.log(600), 1.1)))),
        )
        for _ in range(tasks)
    ]
    work = sum(tokens * steps for tokens, steps in drawn) / (gpus.rate * gpus.count)  # seconds
    gap = work / load / tasks
    now, made = 0.0, []
    for number, (tokens, steps) in enumerate(drawn):
        busy = 1 + 0.8 * math.sin(2 * math.pi * now / (8 * 3600))
        now += rng.expovariate(1 / gap) / busy
        made.append(
            SimTask(
                uid=f"t{number:05}",
                arrival=now,
                steps=steps,
                step_tokens=tokens,
                own=round(_OWN[tokens] * rng.choice(_LARGER)),
                shared=rng.choice((20, 40, 80)),
                priority=rng.choices([one for one, _ in PRIORITIES], [part for _, part in PRIORITIES])[0],
                namespace=rng.choices(list(TENANTS), list(TENANTS.values()))[0],
            )
        )
    return made


def small_instance(seed: int, tasks: int = 8) -> list[SimTask]:
    """Few tasks as in the trace, with fewer steps, that are all there at once."""
    rng = random.Random(seed)
    return [
        SimTask(
            uid=f"t{number}",
            arrival=0.0,
            steps=rng.randint(20, 200),
            step_tokens=(tokens := rng.choice(STEP_TOKENS)),
            own=round(_OWN[tokens] * rng.choice(_LARGER)),
            shared=rng.choice((20, 40, 80)),
        )
        for number in range(tasks)
    ]
