"""The schedules of the peers, GPipe and 1F1B, in the simulator's form. Pure.

Both compute one step of one task at a time and drain the pipeline before its update. Several tasks come one after the
other. Each stage has a fixed order of forwards and backwards; what it does next begins as soon as what it needs is there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from bench.pipeline_sim.simulate import Costs, Microbatch, nanoseconds
from mlora_worker.stream.timeline import Kind, Span, Timeline

Order = list[tuple[Kind, int]]  # of one stage: what, and which microbatch of the step
Schedule = Callable[[int, int, int], Order]  # stages, stage, microbatches of a step


def gpipe(stages: int, stage: int, microbatches: int) -> Order:  # noqa: ARG001
    """All forwards, then all backwards, the first microbatch first. Huang et al., arXiv 1811.06965."""
    forwards: Order = [("forward", number) for number in range(microbatches)]
    backwards: Order = [("backward", number) for number in range(microbatches)]
    return forwards + backwards


def one_f_one_b(stages: int, stage: int, microbatches: int) -> Order:
    """``D - s - 1`` forwards ahead, then forward and backward in turn. Narayanan et al., arXiv 1806.03377."""
    ahead = min(microbatches, stages - stage - 1)
    order: Order = [("forward", number) for number in range(ahead)]
    for number in range(microbatches - ahead):
        order += [("forward", ahead + number), ("backward", number)]
    return order + [("backward", number) for number in range(microbatches - ahead, microbatches)]


def run_schedule(
    schedule: Schedule, steps: Sequence[Sequence[Microbatch]], stages: int, costs: Costs
) -> Timeline:
    """The spans of ``steps`` one after the other, each a flush: its first forward waits for the last backward before it."""
    spans: list[Span] = []
    start = 0
    for microbatches in steps:
        step = _run_step(schedule, microbatches, stages, costs, start)
        spans += step
        start = max(span.end for span in step)
    return Timeline(stages=stages, spans=tuple(spans))


def _run_step(
    schedule: Schedule, microbatches: Sequence[Microbatch], stages: int, costs: Costs, start: int
) -> list[Span]:
    orders = [deque(schedule(stages, stage, len(microbatches))) for stage in range(stages)]
    free = [start] * stages
    arrived: dict[tuple[Kind, int, int], int] = {  # kind, stage, microbatch: when what it needs is there
        ("forward", 0, number): start for number in range(len(microbatches))
    }
    spans: list[Span] = []
    while any(orders):
        progress = False
        for stage, order in enumerate(orders):
            while order and (order[0][0], stage, order[0][1]) in arrived:
                kind, number = order.popleft()
                microbatch = microbatches[number]
                begins = max(free[stage], arrived[kind, stage, number])
                cost = costs.forward if kind == "forward" else costs.backward
                ends = free[stage] = begins + nanoseconds(cost(stage, microbatch.tokens))
                spans.append(
                    Span(
                        stage=stage, kind=kind, number=microbatch.number, tasks=microbatch.tasks,
                        tokens=microbatch.tokens, start=begins, end=ends,
                    )
                )  # fmt: skip
                follower = _follower(kind, stage, stages)
                if follower is not None:
                    moves = follower[1] != stage
                    message = nanoseconds(costs.transfer(microbatch.tokens)) if moves else 0
                    arrived[follower[0], follower[1], number] = ends + message
                progress = True
        if not progress:
            raise ValueError("the schedule waits for itself")
    return spans


def _follower(kind: Kind, stage: int, stages: int) -> tuple[Kind, int] | None:
    """What a microbatch can do next, and where."""
    if kind == "forward":
        return ("forward", stage + 1) if stage < stages - 1 else ("backward", stage)
    return ("backward", stage - 1) if stage else None
