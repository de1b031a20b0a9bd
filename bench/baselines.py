"""``python -m bench baselines``: two ranks against GPipe and 1F1B of torch.distributed.pipelining, on two ranks as well.

The same model, cut at the same layer, the same rows in the same order, one thread a rank. The schedules know one task, so
they train one after the other, each step in as many microbatches as it has rows: the finest cut, which wastes least.
This project's ranks train all tasks at once; tokens per second once the pipeline is full. Real tokens, never padding.
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.base import cut_folder, smollm2_folder
from bench.options import parser, repetitions
from bench.peers.schedule_rank import Job, Order
from bench.peers.started import peer_ranks
from bench.ranks import Ranks, free_ports, task_plans
from bench.report import last_line, table
from bench.rows import gsm8k_rows
from bench.sides import LEARNING_RATE, Disagreement, Setting, in_turns
from bench.steady import run_window, tokens_of

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
STAGES, WARM = 2, 1
PEERS = ("gpipe", "1f1b")
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Rate:
    tokens: int
    seconds: float

    @property
    def value(self) -> float:
        return self.tokens / self.seconds


def main(arguments: list[str]) -> int:
    made = parser("baselines", __doc__)
    made.add_argument("--tasks", type=int, default=2)
    made.add_argument(
        "--batch", type=int, default=None, help="rows of each task's step (default: 2; --long: 4)"
    )
    made.add_argument(
        "--microbatches", type=int, default=None, help="of the peers' step (default: one for each row)"
    )
    made.add_argument(
        "--steps", type=int, default=None, help="of each task, measured (default: 1; --long: 4)"
    )
    options = made.parse_args(arguments)
    count = repetitions(options, usual=2, long=5)
    steps = options.steps or (4 if options.long else 1)
    batch = options.batch or (4 if options.long else 2)
    microbatches = options.microbatches or batch
    setting = Setting(options.tasks, TARGETS)
    times: list[dict[str, Rate]] = []
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        folder = cut_folder(smollm2_folder(), 2, scratch / "model") if options.quick else smollm2_folder()
        rows = gsm8k_rows(folder)
        with Ranks(folder, STAGES, scratch / "ours", options.threads) as ours:
            ours.plan([])
            layers = [
                (stage.first_layer, stage.last_layer + 1) for stage in ours.wait_for(lambda _: True).stages
            ]
            job = Job(
                folder=folder, tasks=options.tasks, targets=TARGETS, batch=batch, microbatches=microbatches,
                layers=tuple(layers), most_steps=WARM + steps + 2, port=free_ports(1)[0], threads=options.threads,
            )  # fmt: skip
            with peer_ranks(job, scratch / "peers") as peers:
                first = {kind: peers.run(Order(kind=kind, steps=(1,), fresh=True)).losses for kind in PEERS}
                for repetition in range(count):
                    turn = {}
                    for side in in_turns(("ours", *PEERS), repetition):
                        plans = task_plans(
                            setting,
                            batch,
                            job.most_steps,
                            LEARNING_RATE,
                            f"run-{repetition}",
                            scratch,
                        )
                        if side == "ours":
                            window = run_window(ours, plans, rows, WARM, steps)
                            turn[side] = Rate(window.tokens, window.seconds)
                            seen = {
                                f"{task}/{step}": loss
                                for (task, step), loss in window.losses.items()
                                if step == 1
                            }
                        else:
                            measured = tuple(range(WARM + 1, WARM + steps + 1))
                            answer = peers.run(Order(kind=side, steps=measured))
                            tokens = sum(tokens_of(rows, plan, measured[0], measured[-1]) for plan in plans)
                            turn[side] = Rate(tokens, answer.seconds)
                    if repetition == 0:
                        check_first_losses(seen, first)
                    times.append(turn)
    rates = {side: statistics.median(turn[side].value for turn in times) for side in ("ours", *PEERS)}
    ratios = {
        peer: statistics.median(turn["ours"].value / turn[peer].value for turn in times) for peer in PEERS
    }
    print(
        table(
            [f"{options.tasks} tasks x {batch} rows", "tokens/s", "ours is x times"],
            [[side, rate, ratios.get(side)] for side, rate in rates.items()],
        )
    )
    print(
        f"{count} repetitions of {steps} steps, stages of layers {layers}, peers with {microbatches} microbatches a step"
    )
    result: dict[str, Any] = {
        **{f"vs_{peer}": ratio for peer, ratio in ratios.items()},
        "tokens_per_second": rates,
        "layers": layers,
        "microbatches": microbatches,
        "tasks": options.tasks,
        "batch": batch,
        "steps": steps,
    }
    print(last_line("baselines", result, repetitions=count, threads=options.threads, quick=options.quick))
    return 0


def check_first_losses(ours: dict[str, float], peers: dict[str, dict[str, float]]) -> None:
    """Of the first step, when all B are zero and dropout has no effect yet. Raises Disagreement."""
    if not ours:
        raise Disagreement("no loss of a first step was seen")
    for kind, losses in peers.items():
        for key, loss in ours.items():
            if not abs(loss - losses[key]) <= TOLERANCE * abs(loss):
                raise Disagreement(f"task/step {key}: ours has loss {loss:.6f}, {kind} {losses[key]:.6f}")
