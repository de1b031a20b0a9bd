"""``python -m bench throughput``: tokens per second of four tasks of two rows a step, against what one would run instead.

Sides: this project (all tasks in shared packed microbatches); Hugging Face PEFT, padded, one task after the other; a tuned
packed run, one task after the other; padded batching of all tasks as in mLoRA's public code. Real tokens are counted,
never padding. Four configurations: q,k,v,o and all linear modules, each in float32 and bfloat16.

Repetitions go on until --minutes are used up, each configuration with its share, one repetition at least. bfloat16 is
left out where the processor has no units for it and the peers' repetition would not fit; the output says so.
--repetitions and --long do as many as they say, whatever time they take.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.base import cut_folder, smollm2_folder, transformers_model, whole_stage
from bench.options import parser
from bench.ours import Ours
from bench.peers.mlora_like import MLoRALike
from bench.peers.packed import Packed
from bench.peers.peft_padded import PeftPadded
from bench.report import last_line, table
from bench.rows import deal, gsm8k_rows, shortest
from bench.sides import (
    Setting,
    Side,
    agree_without_dropout,
    check_losses,
    in_turns,
    median_rate,
    median_ratio,
    timed_step,
    warm_up,
)
from mlora_worker.data.prepare import TokenRow

TASKS, BATCH = 4, 2
ATTENTION_ONLY, ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj"), ("all-linear",)
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1e-2}
CHECKED_LAYERS, CHECKED_TASKS = 2, 2
PEERS = ("peft", "packed", "mlora")
QUICK_ROWS = 16
MOST_REPETITIONS, LONG_REPETITIONS = 5, 7


@dataclass(frozen=True)
class Configuration:
    targets: tuple[str, ...]
    dtype: torch.dtype
    share: float  # of the time, of what is left when it begins

    @property
    def label(self) -> str:
        return f"{'all-linear' if self.targets == ALL_LINEAR else 'q,k,v,o'} {str(self.dtype).removeprefix('torch.')}"


CONFIGURATIONS = (
    Configuration(ATTENTION_ONLY, torch.float32, 0.55),
    Configuration(ALL_LINEAR, torch.float32, 0.7),
    Configuration(ATTENTION_ONLY, torch.bfloat16, 0.5),
    Configuration(ALL_LINEAR, torch.bfloat16, 1.0),
)


@dataclass(frozen=True)
class Measured:
    configuration: Configuration
    products: str  # the library that this project's side multiplied with
    times: list[dict[str, float]]  # per repetition and side, seconds
    tokens: list[int]  # per repetition
    difference: float  # largest relative one between the sides' losses

    def ratio(self, peer: str) -> float | None:
        """This project's tokens per second over the peer's; None where it was not run."""
        if any(peer not in repetition for repetition in self.times):
            return None
        return median_ratio(self.times, peer, "ours")

    def as_json(self) -> dict[str, Any]:
        rates = {name: median_rate(self.times, name, self.tokens) for name in self.times[0]}
        return {
            "targets": list(self.configuration.targets),
            "dtype": str(self.configuration.dtype).removeprefix("torch."),
            "products": self.products,
            "repetitions": len(self.times),
            "tokens": sum(self.tokens),
            "tokens_per_second": rates,
            **{f"vs_{peer}": self.ratio(peer) for peer in PEERS},
            "loss_difference": self.difference,
        }


def main(arguments: list[str]) -> int:
    made = parser("throughput", __doc__)
    made.add_argument("--minutes", type=float, default=10.0, help="to spend on timing (default: 10)")
    options = made.parse_args(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    fixed = options.repetitions or (1 if options.quick else LONG_REPETITIONS if options.long else None)
    budget = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as scratch:
        cut = cut_folder(smollm2_folder(), CHECKED_LAYERS, Path(scratch))
        folder = cut if options.quick else smollm2_folder()
        rows = gsm8k_rows(folder)
        if options.quick:
            rows = shortest(rows, QUICK_ROWS)
        slowdown = bfloat16_slowdown()
        results: list[Measured] = []
        left_out: list[dict[str, str]] = []
        for configuration in CONFIGURATIONS:
            left = max(0.0, budget - time.monotonic())
            reason = None
            if configuration.dtype is torch.bfloat16 and not options.long:
                reason = too_slow(slowdown, results, left)
            if reason is not None:
                left_out.append({"config": configuration.label, "reason": reason})
                print(f"{configuration.label}: left out, {reason}")
                continue
            peers = (
                PEERS if options.long or options.quick or configuration is CONFIGURATIONS[0] else PEERS[:2]
            )
            measured = measure(
                configuration, folder, cut, rows, peers,
                fixed=fixed, until=time.monotonic() + left * configuration.share,
            )  # fmt: skip
            results.append(measured)
            print(show(measured), flush=True)
    first, everywhere = results[0], results[1]
    result = {
        **{f"vs_{peer}": first.ratio(peer) for peer in PEERS},
        "vs_peft_all": everywhere.ratio("peft"),
        "products": first.products,
        "configs": [measured.as_json() for measured in results],
        "left_out": left_out,
        "bfloat16_slowdown": slowdown,
        "tasks": TASKS,
        "batch": BATCH,
    }
    repetitions = len(first.times)
    print(
        last_line("throughput", result, repetitions=repetitions, threads=options.threads, quick=options.quick)
    )
    return 0


def measure(
    configuration: Configuration,
    folder: Path,
    cut: Path,
    rows: Sequence[TokenRow],
    peers: Sequence[str],
    *,
    fixed: int | None,
    until: float,
) -> Measured:
    """Check that all sides compute the same, warm up, then time them in turns.

    ``fixed`` repetitions, or as many as end before ``until`` (monotonic seconds), by the length of the former one.
    """
    dtype, tolerance = configuration.dtype, TOLERANCE[configuration.dtype]
    agree(configuration, cut, rows, peers)
    sides = build(folder, dtype, Setting(TASKS, configuration.targets), peers)
    warm_up(sides.values(), deal(rows, TASKS, BATCH, 0))
    times: list[dict[str, float]] = []
    tokens: list[int] = []
    difference = last = 0.0
    while len(times) < (fixed or MOST_REPETITIONS) and (
        fixed or not times or time.monotonic() + last < until
    ):
        began = time.monotonic()
        batch = deal(rows, TASKS, BATCH, step=len(times))
        turns = {name: timed_step(sides[name], batch) for name in in_turns(tuple(sides), len(times))}
        if not times:
            # All B are zero still, so dropout, which is random on every side, has had no effect on the losses.
            difference = check_losses({name: turns[name][1] for name in sides}, tolerance)
        times.append({name: turns[name][0] for name in sides})
        tokens.append(batch.tokens)
        last = time.monotonic() - began
    ours = sides["ours"]
    assert isinstance(ours, Ours)
    return Measured(configuration, ours.engine.stage.products, times, tokens, difference)


def agree(configuration: Configuration, cut: Path, rows: Sequence[TokenRow], peers: Sequence[str]) -> None:
    """A few steps without dropout on a cut model, from the same adapters: each loss after an update must be the same."""
    setting = Setting(CHECKED_TASKS, configuration.targets, dropout=0.0)
    sides = build(cut, configuration.dtype, setting, peers)
    ours = sides.pop("ours")
    assert isinstance(ours, Ours)
    peers_of = [side for side in sides.values() if isinstance(side, PeftPadded | Packed | MLoRALike)]
    assert len(peers_of) == len(sides)
    agree_without_dropout(ours, peers_of, rows, CHECKED_TASKS, TOLERANCE[configuration.dtype])


def build(folder: Path, dtype: torch.dtype, setting: Setting, peers: Sequence[str]) -> dict[str, Side]:
    base = transformers_model(folder, dtype)
    kinds: dict[str, Callable[[Any, Setting], Side]] = {
        "peft": PeftPadded,
        "packed": Packed,
        "mlora": MLoRALike,
    }
    return {
        "ours": Ours(whole_stage(folder, dtype), setting),
        **{peer: kinds[peer](base, setting) for peer in peers},
    }


def bfloat16_slowdown(clock: Any = time.perf_counter) -> float:
    """Time of a backward product in bfloat16 over that in float32 on this processor."""
    times = []
    for dtype in (torch.float32, torch.bfloat16):
        gradient, weight = torch.ones(64, 576, dtype=dtype), torch.ones(576, 576, dtype=dtype)
        gradient @ weight
        began = clock()
        for _ in range(3):
            gradient @ weight
        times.append(clock() - began)
    return float(times[1] / times[0])


def too_slow(slowdown: float, results: Sequence[Measured], left: float) -> str | None:
    """Why a bfloat16 configuration is left out; None when one repetition should fit into ``left`` seconds."""
    once = max(sum(measured.times[0].values()) for measured in results)
    expected = once * max(1.0, slowdown)
    if slowdown <= 2 or expected <= left:
        return None
    return (
        f"torch's bfloat16 products take {slowdown:.0f} times as long as float32 here (no units for them): the peers' "
        f"repetition would take up to {expected / 60:.0f} minutes; --long runs it"
    )


def show(measured: Measured) -> str:
    content: Mapping[str, Any] = measured.as_json()
    rows = [
        [name, rate, None if name == "ours" else content[f"vs_{name}"]]
        for name, rate in content["tokens_per_second"].items()
    ]
    head = [measured.configuration.label, "tokens/s", "ours is x times"]
    return (
        f"{table(head, rows)}\n{content['repetitions']} repetitions, {content['tokens']:,} tokens, losses of the first "
        f"step differ by {measured.difference:.1e} at most; products of {measured.products}\n"
    )
