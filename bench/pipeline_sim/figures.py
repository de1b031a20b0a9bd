"""The figures and the table of docs/contributors/lorapp.md, all simulated.

    python -m bench.pipeline_sim.figures docs/images

writes the figures and prints the table; a unit test compares both with what is committed.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from bench.pipeline_sim.fixed_rule import FixedRule
from bench.pipeline_sim.formulae import flushed_bubble, lorapp_bubble, lorapp_held, one_f_one_b_held
from bench.pipeline_sim.peer_schedules import Schedule, gpipe, one_f_one_b, run_schedule
from bench.pipeline_sim.simulate import EvenCosts, LinearCosts, Microbatch, Workload, simulate
from mlora_worker.stream.drawing import Panel, draw
from mlora_worker.stream.timeline import Timeline, bubble, excerpt, peak_microbatches, window_of_microbatches
from mlora_worker.stream.turns import PATIENCE

STAGES = 4
# A microbatch of 100 tokens takes 10 ms forward and 20 ms backward on every stage.
COSTS = LinearCosts((1e-4,) * STAGES, (2e-4,) * STAGES)
_UNLIMITED = 10**9  # tokens of a microbatch


def figures() -> dict[str, str]:
    """SVG by file name."""
    return {
        "schedules.svg": draw(
            [
                _shown("GPipe, a step of four tasks, each in 2 microbatches", _peer(gpipe)),
                _shown("1F1B, the same", _peer(one_f_one_b)),
                _shown("LoRAPP, three steps of four tasks, not split", _lorapp(4, 1)),
            ]
        ),
        "few-tasks.svg": draw(
            [
                _shown("LoRAPP, four steps of two tasks, not split", _lorapp(2, 1)),
                _shown("LoRAPP, the same, split into 3 microbatches", _lorapp(2, 3)),
            ]
        ),
        "many-tasks.svg": draw(
            [
                _shown(
                    "BatchLoRA in LoRAPP, three steps of eight tasks in four groups of two",
                    _lorapp(8, 1, fused=2),
                )
            ]
        ),
        "patience.svg": draw(
            [
                Panel(f"{title}: bubble {share:.0%}", piece)
                for title, (share, piece) in {
                    "Messages take 0.3 ms, stages are greedy": _late(patience=0.0),
                    "Stages wait a moment for a gradient": _late(PATIENCE),
                }.items()
            ]
        ),
    }


def table() -> str:
    """Markdown: bubbles and peaks of what the simulator ran beside what the formulae say."""
    head = (
        "| D | L | N | GPipe, 1F1B: formula | simulated | LoRAPP: formula | simulated "
        "| most held on stage 0, 1F1B | LoRAPP, simulated | bound |\n"
        "|---|---|---|---|---|---|---|---|---|---|\n"
    )
    shapes = (
        (2, 1, 2),
        (2, 2, 1),
        (4, 1, 4),
        (4, 2, 1),
        (4, 2, 3),
        (4, 4, 1),
        (8, 1, 8),
        (8, 4, 1),
        (8, 2, 7),
        (8, 8, 1),
    )
    return head + "\n".join(_row(*shape) for shape in shapes) + "\n"


def _row(stages: int, groups: int, microbatches: int) -> str:
    costs = EvenCosts(0.01, 0.02)
    step = [Microbatch(number, ("a",), 1) for number in range(microbatches)]
    flushed = bubble(run_schedule(one_f_one_b, [step], stages, costs))
    work = [Workload(f"task {n}", [[1] * microbatches] * 12) for n in range(groups)]
    rule = partial(FixedRule, microbatches=microbatches)
    timeline = simulate(work, stages, _UNLIMITED, costs, rule, patience=0.0)
    round_ = groups * microbatches
    seen = bubble(timeline, *window_of_microbatches(timeline, 4 * round_, 4 * round_))
    cells = [
        stages, groups, microbatches,
        f"{flushed_bubble(stages, microbatches):.1%}", f"{flushed:.1%}",
        f"{lorapp_bubble(stages, groups, microbatches):.1%}", f"{abs(seen):.1%}",
        one_f_one_b_held(stages, 0, microbatches), peak_microbatches(timeline)[0],
        lorapp_held(stages, 0, groups, microbatches),
    ]  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


def _peer(schedule: Schedule) -> Timeline:
    """One step of each of four tasks, 200 tokens each."""
    steps = [
        [Microbatch(2 * task + half + 1, (f"task {task + 1}",), 100) for half in range(2)]
        for task in range(4)
    ]
    return run_schedule(schedule, steps, STAGES, COSTS)


def _lorapp(tasks: int, microbatches: int, fused: int = 1) -> Timeline:
    """Steps of 200 tokens a group; of 300 with two tasks. So many that pictures are alike long."""
    step = 300 if tasks == 2 else 200
    rows = [step // microbatches // fused] * microbatches
    names = [f"task {number + 1}" for number in range(tasks)]
    groups = [names[start :: tasks // fused] for start in range(tasks // fused)]
    steps = 4 if len(groups) < 4 else 3
    work = [Workload(name, [rows] * steps) for name in names]
    rule = partial(FixedRule, microbatches=microbatches, groups=groups)
    return simulate(work, STAGES, _UNLIMITED, COSTS, rule)


def _late(patience: float) -> tuple[float, Timeline]:
    """Two tasks whose steps are cut in three: the bubble, and a piece of the steady state."""
    costs = EvenCosts(0.01, 0.02, 0.0003)
    work = [Workload(f"task {number + 1}", [[100] * 3] * 12) for number in range(2)]
    timeline = simulate(work, STAGES, _UNLIMITED, costs, partial(FixedRule, microbatches=3), patience)
    window = window_of_microbatches(timeline, 24, 18)
    return bubble(timeline, *window), excerpt(timeline, *window)


def _shown(title: str, timeline: Timeline) -> Panel:
    return Panel(f"{title}: bubble {bubble(timeline):.0%}, from start to end", timeline)


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, picture in figures().items():
        (folder / name).write_text(picture, encoding="utf-8")
    print(table(), end="")


if __name__ == "__main__":
    main()
