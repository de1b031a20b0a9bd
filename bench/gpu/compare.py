"""``python -m bench gpu``: eight adapters in packed steps on one GPU against PEFT, one adapter after the other.

Random bfloat16 weights of the shape of Llama-3.2-1B or Llama-3-8B, shared by all sides; rows as long as GSM8K's, rank
16, dropout 0.05. Sides: this project, PEFT padded, PEFT packed (variable-length attention, logits of supervised tokens
only). They alternate; medians. Also memory, the use of the device's arithmetic, kernels of eight tasks against one, and
the heaviest kernels. Without a GPU it runs on the CPU: take ``--dry-run``, whose figures mean nothing.

Each figure is printed as a line of JSON when it is there, so what is stopped early has said what it had; the last line has
all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.gpu import experts, forms, hybrids, tiles
from bench.gpu.base import random_base
from bench.gpu.measure import Kernels, kernels, peak_flops, peak_gib, seconds, useful_flops
from bench.gpu.peers import PeftPackedOnDevice, PeftPaddedOnDevice, PeftTasks
from bench.gpu.rows import SHORTEN_TINY, deal, rows
from bench.ours import Ours
from bench.report import last_line, table
from bench.rows import Batch, pack
from bench.sides import LEARNING_RATE, Setting, Side, in_turns
from mlora_worker.pipeline.engine import StageEngine
from mlora_worker.stream.items import Segment, Train

TASKS = 8
TARGETS = {"qkvo": ("q_proj", "k_proj", "v_proj", "o_proj"), "all-linear": ("all-linear",)}
ROWS = {"1b": 64, "8b": 16, "tiny": 16}  # of all tasks: about 14,000 and 3,500 tokens a step
WARM_UP = 2
INSTEAD = {
    "forms": "this project on a base in 8 and in 4 bits, and on pairs (DPO)",
    "hybrids": "layers with a state by kernels, beside torch's row by row",
    "experts": "routed experts by torch's grouped product, beside the loop",
    "tiles": "the Triton kernels with other blocks",
}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=("1b", "8b"), default="1b")
    parser.add_argument("--targets", choices=sorted(TARGETS), default="qkvo")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--dry-run", action="store_true", help="a tiny model, once: shows that it runs")
    instead = parser.add_mutually_exclusive_group()
    for name, what in INSTEAD.items():
        instead.add_argument(f"--{name}", action="store_true", help=f"instead: {what}")
    parser.add_argument("--json", type=Path, help="also write the result there")
    options = parser.parse_args(arguments)
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # the profiler's own messages
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not options.dry_run:
        print("no GPU: --dry-run shows that it runs", file=sys.stderr)
        return 2
    tiny, repetitions = options.dry_run, 1 if options.dry_run else options.repetitions
    shape = "tiny" if tiny else options.model
    if options.tiles:
        result = tiles.compare(device, tiny=tiny)
    elif options.hybrids:
        result = hybrids.compare(repetitions, device, say, tiny=tiny)
    elif options.experts:
        result = experts.compare(repetitions, device, say, tiny=tiny)
    elif options.forms:
        result = forms.compare(shape, repetitions, device, say)
    else:
        result = compare(shape, options.targets, repetitions, device)
    line = last_line(
        "gpu",
        result | {"device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu"},
        repetitions=repetitions,
        threads=torch.get_num_threads(),
        quick=options.dry_run,
    )
    if options.json:
        options.json.write_text(line + "\n")
    print(line)
    return 0


def say(partial: dict[str, Any]) -> None:
    print(json.dumps({"bench": "gpu", "partial": True} | partial), flush=True)


def compare(model: str, targets: str, repetitions: int, device: torch.device) -> dict[str, Any]:
    base = random_base(model, torch.bfloat16, device)
    architecture = base.stage.architecture
    setting = Setting(TASKS, TARGETS[targets])
    all_rows = rows(ROWS[model], architecture.vocab_size, shorter=SHORTEN_TINY if model == "tiny" else 1)
    batch = deal(all_rows, TASKS)
    peft = PeftTasks(base.model, setting)
    ours = Ours(base.stage, setting, budget=2**30)
    sides: list[Side] = [ours, PeftPaddedOnDevice(peft), PeftPackedOnDevice(peft)]
    memory, losses = {}, {}
    flops = useful_flops(architecture, batch, setting.rank, setting.targets)
    peak = peak_flops(torch.cuda.get_device_name()) if device.type == "cuda" else None
    for side in sides:
        for _ in range(WARM_UP):
            memory[side.name] = peak_gib(lambda side=side: losses.update({side.name: once(side, batch)}))  # type: ignore[misc]
        if side is ours:  # before the others, which may take the rest of the time
            alone = statistics.median(seconds(lambda: once(ours, batch)) for _ in range(repetitions))
            say(
                {
                    "model": model, "targets": targets, "tokens_per_second": {"ours": batch.tokens / alone},
                    "mfu": {"ours": flops / alone / peak if peak else None}, "peak_gib": dict(memory),
                }
            )  # fmt: skip
    times = time_sides(sides, batch, repetitions)
    medians = {side.name: statistics.median(times[side.name]) for side in sides}
    say({"model": model, "targets": targets, "seconds": times, "peak_gib": memory})
    use = {name: flops / spent / peak if peak else None for name, spent in medians.items()}
    together, single = (
        kernels(lambda tasks=tasks: microbatch(ours.engine, batch, tasks))  # type: ignore[misc]
        for tasks in (TASKS, 1)
    )
    whole = kernels(lambda: once(ours, batch))
    print(show(model, batch, medians, use, memory, whole))
    return {
        "model": model,
        "targets": targets,
        "tasks": TASKS,
        "tokens": batch.tokens,
        "supervised": sum(batch.supervised),
        "vs_peft": medians["peft"] / medians["ours"],
        "vs_packed": medians["packed"] / medians["ours"],
        "tokens_per_second": {name: batch.tokens / spent for name, spent in medians.items()},
        "seconds": times,
        "flops": flops,
        "mfu": use,
        "peak_gib": memory,
        "losses": losses,
        "kernels": {  # of a forward and a backward; whole: with the updates of all tasks
            "tasks": together.count,
            "one_task": single.count,
            "ratio": together.count / single.count,
            "whole": whole.count,
            "busy": whole.busy / medians["ours"],
        },
        "top_kernels": whole.top,
    }


def once(side: Side, batch: Batch) -> list[float]:
    return side.step(batch, LEARNING_RATE)


def time_sides(sides: Sequence[Side], batch: Batch, repetitions: int) -> dict[str, list[float]]:
    by_name = {side.name: side for side in sides}
    times: dict[str, list[float]] = {name: [] for name in by_name}
    for repetition in range(repetitions):
        for name in in_turns(list(by_name), repetition):
            side = by_name[name]
            times[name].append(seconds(lambda side=side: once(side, batch)))  # type: ignore[misc]
    return times


def show(
    model: str,
    batch: Batch,
    medians: dict[str, float],
    use: dict[str, float | None],
    memory: dict[str, float | None],
    together: Kernels,
) -> str:
    head = ["", "tokens/s", "ms a step", "use of arithmetic", "peak GiB"]
    lines = [
        [name, batch.tokens / spent, spent * 1e3, use[name], memory[name]] for name, spent in medians.items()
    ]
    heaviest = [[one["name"][:60], one["calls"], one["ms"], one["share"]] for one in together.top]
    return "\n".join(
        [
            f"{model}: {TASKS} tasks, {batch.tokens} tokens a step",
            table(head, lines),
            "",
            table(["kernel", "calls", "ms", "share"], heaviest),
        ]
    )


def microbatch(engine: StageEngine, batch: Batch, tasks: int) -> None:
    """Forward and backward of all rows in one microbatch, dealt to the first ``tasks`` tasks."""
    all_rows = [row for rows in batch.rows for row in rows]
    each = len(all_rows) // tasks
    segments = tuple(
        Segment(
            task=f"task-{task}",
            step=1,
            lengths=tuple(len(row.ids) for row in all_rows[task * each : (task + 1) * each]),
            first_row=0,
            weight=1.0,
            closes_step=True,
        )
        for task in range(tasks)
    )
    packed = pack(all_rows)
    item = Train(number=-1, segments=segments)  # a number that no step has
    engine.forward(item, token_ids=packed.ids, hidden=None, labels=packed.targets)
    engine.backward(item.number, None)
