"""``python -m bench limit``: what eight adapters cost on top of the frozen base.

One optimizer step of eight tasks with adapters on all linear modules and dropout, over a forward and the gradient of the
input of the base alone: the same packed tokens, layers, attention and loss, no adapter. The base is the least that any
trainer of adapters has to compute. It is timed twice: with torch's own linear modules, and with those that this project
puts in their place, which add up input gradients of q, k and v in place; the faster one of a repetition counts. All in
turns; the median of the ratios.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.base import cut_folder, smollm2_folder, whole_stage
from bench.options import parser, repetitions
from bench.ours import Ours, Stopwatch
from bench.report import last_line, table
from bench.rows import Batch, deal, gsm8k_rows, pack, shortest
from bench.sides import LEARNING_RATE, Setting, check_losses, in_turns, median_ratio, timed_step
from mlora_worker.model.attention import PackedRows
from mlora_worker.model.stage import Stage
from mlora_worker.pipeline.engine import StageEngine

TASKS, TARGETS = 8, ("all-linear",)
PARTS = ("forward", "backward", "update")
BASES = ("base", "base_adapted")
TOLERANCE = {"float32": 1e-3, "bfloat16": 1e-2}


class FrozenBase:
    """Forward and gradient of the embeddings' output; no adapter, so no update. ``adapted``: with the linear modules
    that a stage engine puts into the layers, without anything to add.
    """

    name = "base"

    def __init__(self, stage: Stage, *, adapted: bool = False) -> None:
        self._stage = StageEngine(stage).stage if adapted else stage
        self.watch = Stopwatch()

    def step(self, batch: Batch, learning_rate: float) -> list[float]:
        del learning_rate
        stage, packed = self._stage, pack([row for rows in batch.rows for row in rows])
        segments = tuple(sum(len(row.ids) for row in rows) for rows in batch.rows)
        with self.watch("forward"):
            rows = PackedRows(packed.lengths, stage.device)
            source = stage.embed(packed.ids, rows).detach().requires_grad_()
            hidden = stage.run_layers(source, rows)
            losses = stage.losses(hidden, packed.targets, segments)
        with self.watch("backward"):
            torch.autograd.backward(losses.sum())
        return [loss / count for loss, count in zip(losses.tolist(), batch.supervised, strict=True)]


def main(arguments: list[str]) -> int:
    made = parser("limit", __doc__)
    made.add_argument("--batch", type=int, default=None, help="rows of each task (default: 1; --long: 2)")
    made.add_argument(
        "--dtype", choices=tuple(TOLERANCE), default="float32", help="of the base (default: float32)"
    )
    options = made.parse_args(arguments)
    torch.set_num_threads(options.threads)
    dtype: torch.dtype = getattr(torch, options.dtype)
    size = options.batch or (2 if options.long else 1)
    count = repetitions(options, usual=3, long=9)
    with tempfile.TemporaryDirectory() as scratch:
        folder = cut_folder(smollm2_folder(), 2, Path(scratch)) if options.quick else smollm2_folder()
        rows = gsm8k_rows(folder)
        if options.quick:
            rows = shortest(rows, TASKS * size)
        # A microbatch as wide as all rows: the base, too, computes them at once.
        ours = Ours(whole_stage(folder, dtype), Setting(TASKS, TARGETS), budget=2**30, separate_updates=True)
        bases = {
            name: FrozenBase(whole_stage(folder, dtype), adapted=name == "base_adapted") for name in BASES
        }
    sides: dict[str, Ours | FrozenBase] = {"ours": ours, **bases}
    for side in sides.values():  # compiles and allocates as much as is timed; the adapters stay as they are
        side.step(deal(rows, TASKS, size, 0), 0.0)
    times: list[dict[str, float]] = []
    parts: list[dict[str, dict[str, float]]] = []
    tokens = 0
    for repetition in range(count):
        batch = deal(rows, TASKS, size, repetition)
        tokens += batch.tokens
        for side in sides.values():
            side.watch.parts.clear()
        turns = {
            name: timed_step(sides[name], batch, LEARNING_RATE) for name in in_turns(tuple(sides), repetition)
        }
        if repetition == 0:  # all B are zero: the adapters change nothing yet
            check_losses({name: turns[name][1] for name in sides}, TOLERANCE[options.dtype])
        times.append({name: turns[name][0] for name in sides})
        parts.append({name: dict(side.watch.parts) for name, side in sides.items()})
    over_base = statistics.median(one["ours"] / min(one[name] for name in BASES) for one in times)
    split = {name: {part: _median(parts, name, part) for part in PARTS} for name in sides}
    print(
        table(
            [f"seconds, {TASKS} tasks x {size} rows", *PARTS, "step"],
            [[name, *split[name].values(), statistics.median(one[name] for one in times)] for name in sides],
        )
    )
    print(
        f"{count} repetitions, {tokens:,} tokens: a step takes {over_base:.3f} times as long as the base alone"
    )
    result: dict[str, Any] = {
        "over_base": over_base,
        "over": {name: median_ratio(times, "ours", name) for name in BASES},
        "seconds": split,
        "tokens": tokens,
        "tasks": TASKS,
        "batch": size,
        "dtype": options.dtype,
        "products": ours.engine.stage.products,  # of all sides
    }
    print(last_line("limit", result, repetitions=count, threads=options.threads, quick=options.quick))
    return 0


def _median(parts: Sequence[dict[str, dict[str, float]]], name: str, part: str) -> float:
    return statistics.median(repetition[name].get(part, 0.0) for repetition in parts)
