"""``python -m bench pipeline``: two ranks against one, each with one thread, training the same tasks.

Real processes (``python -m mlora_worker``), a plan over HTTP, tokens per second from the reports once the pipeline is
full; start-up is left out. Both groups stay up while the other one is measured: ranks that wait use no processor. The
busy time of each stage shows how evenly the layers are dealt: two stages cannot be faster than the busier one.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from bench.base import cut_folder, smollm2_folder
from bench.options import parser, repetitions
from bench.ranks import Ranks, task_plans
from bench.report import last_line, table
from bench.rows import gsm8k_rows
from bench.sides import LEARNING_RATE, Setting, in_turns
from bench.steady import Window, check_same_losses, run_window

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
WARM = 1
TOLERANCE = 1e-3


def main(arguments: list[str]) -> int:
    made = parser("pipeline", __doc__)
    made.add_argument("--tasks", type=int, default=4)
    made.add_argument("--batch", type=int, default=None, help="rows of each task's step (default: 2)")
    made.add_argument(
        "--steps", type=int, default=None, help="of each task, measured (default: 2; --long: 4)"
    )
    options = made.parse_args(arguments)
    count = repetitions(options, usual=2, long=5)
    steps = options.steps or (1 if options.quick else 4 if options.long else 2)
    batch = options.batch or (1 if options.quick else 2)
    setting = Setting(options.tasks, TARGETS)
    windows: list[dict[str, Window]] = []
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        folder = cut_folder(smollm2_folder(), 2, scratch / "model") if options.quick else smollm2_folder()
        rows = gsm8k_rows(folder)
        with (
            Ranks(folder, 1, scratch / "one", options.threads) as one,
            Ranks(folder, 2, scratch / "two", options.threads) as two,
        ):
            groups = {"one": one, "two": two}
            for group in groups.values():
                group.plan([])  # returns when all stages have loaded the model
            layers = [
                f"{stage.first_layer}-{stage.last_layer}" for stage in two.wait_for(lambda _: True).stages
            ]
            for repetition in range(count):
                turn = {}
                for side in in_turns(tuple(groups), repetition):
                    plans = task_plans(
                        setting, batch, WARM + steps + 2, LEARNING_RATE, f"run-{repetition}", scratch
                    )
                    turn[side] = run_window(groups[side], plans, rows, WARM, steps)
                check_same_losses(turn["one"], turn["two"], TOLERANCE)
                windows.append(turn)
    speedup = statistics.median(turn["two"].rate / turn["one"].rate for turn in windows)
    rates = {side: statistics.median(turn[side].rate for turn in windows) for side in groups}
    busy = [
        statistics.median(turn["two"].busy[stage] / turn["two"].seconds for turn in windows)
        for stage in (0, 1)
    ]
    bound = statistics.median(sum(turn["two"].busy) / max(turn["two"].busy) for turn in windows)
    print(table(["ranks", "tokens/s"], [[side, rate] for side, rate in rates.items()]))
    print(
        table(
            ["stage", "layers", "busy"],
            [[number, layers[number], f"{busy[number]:.1%}"] for number in (0, 1)],
        )
    )
    print(
        f"{count} repetitions of {steps} steps of {options.tasks} tasks: two ranks are {speedup:.3f} times as fast as one; "
        f"with these stages and no waiting it would be {bound:.3f}"
    )
    result: dict[str, Any] = {
        "speedup": speedup,
        "tokens_per_second": rates,
        "stages": [{"layers": layers[number], "busy": busy[number]} for number in (0, 1)],
        "bound_by_balance": bound,
        "tasks": options.tasks,
        "batch": batch,
        "steps": steps,
    }
    print(last_line("pipeline", result, repetitions=count, threads=options.threads, quick=options.quick))
    return 0
