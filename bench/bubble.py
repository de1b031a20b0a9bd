"""Idle time of real pipelines against the formulae and the simulator.

2, 4 and 8 processes with the worker's own links, transport, mailbox, loop and issue rule; only the engine sleeps instead of
computing. L tasks are in flight, each step of each cut into N microbatches. In the steady state the bubble shall be nil
where (L - 1) * N >= D - 1, and (D - 1 - (L - 1) * N) / (N + D - 1) elsewhere.

measured:  1 - work / time, where work is what forwards and backwards were told to take. So everything counts as idle that
           is not the schedule's: late wake-ups, messages, the loop itself.
waited:    the part of it in which stages waited for something, by the recorded spans.
simulated: the simulator, with messages as late as they were here.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from bench.options import parser, repetitions
from bench.pipeline_sim.fixed_rule import FixedRule
from bench.pipeline_sim.formulae import has_no_bubble, lorapp_bubble
from bench.pipeline_sim.simulate import EvenCosts, Workload, simulate
from bench.report import last_line, table
from bench.sleepers import TOKENS, Shape, run_pipeline
from mlora_worker.stream.timeline import Timeline, bubble, window_of_microbatches

# Stages, groups, microbatches: full and not full.
CONFIGS = (
    (2, 2, 1), (2, 2, 2), (2, 1, 1), (2, 1, 4),
    (4, 4, 1), (4, 2, 3), (4, 4, 2), (4, 2, 1), (4, 3, 1), (4, 1, 4),
    (8, 8, 1), (8, 2, 7), (8, 4, 3), (8, 4, 1), (8, 1, 8),
)  # fmt: skip
QUICK = ((2, 2, 1), (2, 1, 2), (4, 4, 1), (4, 2, 1))
WARM_UP = 2  # rounds before the measurement
FORWARD, BACKWARD = 0.08, 0.16  # seconds
WORTH = 0.01  # of a bubble: what the goal allows


@dataclass(frozen=True, slots=True)
class Result:
    shape: Shape
    measured: float
    waited: float
    message: float  # seconds

    @property
    def formula(self) -> float:
        return lorapp_bubble(self.shape.stages, self.shape.groups, self.shape.microbatches)

    @property
    def simulated(self) -> float:
        shape = self.shape
        work = [
            Workload(f"task {number}", [[TOKENS] * shape.microbatches] * shape.rounds)
            for number in range(shape.groups)
        ]
        timeline = simulate(
            work,
            shape.stages,
            10**9,
            EvenCosts(shape.forward, shape.backward, self.message),
            lambda stages, budget: FixedRule(stages, budget, shape.microbatches),
        )
        return throughput_bubble(timeline, shape)


def main(arguments: list[str]) -> int:
    options = parser("bubble", __doc__).parse_args(arguments)
    repeat = repetitions(options, 1, 3)
    measured_rounds = 2 if options.quick else 3
    scale = 0.25 if options.quick else 1.0
    results = []
    for stages, groups, microbatches in QUICK if options.quick else CONFIGS:
        shape = Shape(
            stages, groups, microbatches, WARM_UP + measured_rounds + 2, FORWARD * scale, BACKWARD * scale
        )
        results.append(measure(shape, repeat))
    print(f"forward {FORWARD * scale * 1e3:.0f} ms, backward {BACKWARD * scale * 1e3:.0f} ms; bubbles in %")
    print(
        table(
            ("stages", "groups", "microbatches", "formula", "simulated", "measured", "waited", "message ms"),
            [
                (
                    str(one.shape.stages), one.shape.groups, one.shape.microbatches, one.formula * 100,
                    one.simulated * 100, one.measured * 100, one.waited * 100, one.message * 1e3,
                )
                for one in results
            ],
        )
    )  # fmt: skip
    print(last_line("bubble", summary(results), repetitions=repeat, threads=1, quick=options.quick))
    return 0


def measure(shape: Shape, repeat: int) -> Result:
    timelines = [run_pipeline(shape) for _ in range(repeat)]
    return Result(
        shape,
        statistics.median(throughput_bubble(timeline, shape) for timeline in timelines),
        statistics.median(bubble(timeline, *window(timeline, shape)) for timeline in timelines),
        statistics.median(message_seconds(timeline) for timeline in timelines),
    )


def window(timeline: Timeline, shape: Shape) -> tuple[int, int]:
    """Whole rounds, without the first ones and the last two."""
    each = shape.groups * shape.microbatches
    return window_of_microbatches(timeline, each * WARM_UP, each * (shape.rounds - WARM_UP - 2))


def throughput_bubble(timeline: Timeline, shape: Shape) -> float:
    """1 - work / time in the window."""
    start, end = window(timeline, shape)
    rounds = shape.rounds - WARM_UP - 2
    work = rounds * shape.groups * shape.microbatches * (shape.forward + shape.backward)
    return 1 - work * 1e9 / (end - start)


def message_seconds(timeline: Timeline) -> float:
    """Median time from the end of a forward to its start on the next stage, where that one had nothing else to do."""
    ends = {(span.stage, span.number): span.end for span in timeline.spans if span.kind == "forward"}
    idle_since: dict[int, int] = {}
    gaps = []
    for span in sorted(timeline.spans, key=lambda span: span.start):
        sent = ends.get((span.stage - 1, span.number)) if span.kind == "forward" else None
        if sent is not None and idle_since.get(span.stage, 0) <= sent:
            gaps.append((span.start - sent) / 1e9)
        idle_since[span.stage] = span.end
    return statistics.median(gaps) if gaps else 0.0


def summary(results: list[Result]) -> dict[str, object]:
    full = [
        one for one in results if has_no_bubble(one.shape.stages, one.shape.groups, one.shape.microbatches)
    ]
    others = [one for one in results if one not in full]
    worst = max(full, key=lambda one: one.measured)
    return {
        "measured": worst.measured,
        "predicted": worst.formula,
        "simulated": worst.simulated,
        "elsewhere": max(abs(one.measured - one.formula) for one in others),
        "goal": WORTH,
        "configs": [
            {
                "stages": one.shape.stages,
                "groups": one.shape.groups,
                "microbatches": one.shape.microbatches,
                "predicted": one.formula,
                "simulated": one.simulated,
                "measured": one.measured,
                "waited": one.waited,
                "message_ms": one.message * 1e3,
            }
            for one in results
        ],
    }
