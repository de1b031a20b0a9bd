"""``python -m bench quantised``: four tasks on a base in 4 bits, against QLoRA as PEFT and bitsandbytes have it.

Sides, in turns: this project (all tasks in shared packed microbatches) on nf4, double; Hugging Face PEFT on
the same base, quantised by transformers and bitsandbytes in the same way, padded, one task after the other. Adapters on all
linear modules. This project on int8 is timed beside them. Real tokens are counted, never padding.

``bytes_per_parameter``: what the linear modules of the decoder layers take while the stage is idle, over their weights.
"""

from __future__ import annotations

import math
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from bench.base import cut_folder, smollm2_folder, whole_stage
from bench.options import parser, repetitions
from bench.ours import Ours
from bench.peers.peft_padded import PeftPadded
from bench.report import last_line, table
from bench.rows import deal, gsm8k_rows, shortest
from bench.sides import (
    LEARNING_RATE,
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
from mlora_worker.model.quantisation import freeze_of
from mlora_worker.model.stage import Stage
from mlora_worker.protocol import Quantization

TASKS, BATCH = 4, 2
TARGETS = ("all-linear",)
TOLERANCE = 1e-3
CHECKED_LAYERS, CHECKED_TASKS = 2, 2
DTYPE = torch.float32
KINDS = {"ours": Quantization(type="nf4"), "ours_int8": Quantization(type="int8")}


def main(arguments: list[str]) -> int:
    options = parser("quantised", __doc__).parse_args(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    count = repetitions(options, usual=3, long=7)
    with tempfile.TemporaryDirectory() as scratch:
        cut = cut_folder(smollm2_folder(), CHECKED_LAYERS, Path(scratch))
        folder = cut if options.quick else smollm2_folder()
        rows = gsm8k_rows(folder)
        if options.quick:
            rows = shortest(rows, TASKS * BATCH)
        agree(cut, rows)
        stages = {name: quantised_stage(folder, kind) for name, kind in KINDS.items()}
        setting = Setting(TASKS, TARGETS)
        sides: dict[str, Side] = {name: Ours(stage, setting) for name, stage in stages.items()}
        sides["qlora"] = PeftPadded(qlora_base(folder), setting)
    warm_up(sides.values(), deal(rows, TASKS, BATCH, 0))
    times: list[dict[str, float]] = []
    tokens: list[int] = []
    difference, load = 0.0, [os.getloadavg()[0]]
    for repetition in range(count):
        batch = deal(rows, TASKS, BATCH, repetition)
        turns = {
            name: timed_step(sides[name], batch, LEARNING_RATE) for name in in_turns(tuple(sides), repetition)
        }
        if (
            repetition == 0
        ):  # all B are zero: dropout, which is random on both sides, has no effect on the losses yet
            difference = check_losses({name: turns[name][1] for name in ("ours", "qlora")}, TOLERANCE)
        times.append({name: turns[name][0] for name in sides})
        tokens.append(batch.tokens)
        load.append(os.getloadavg()[0])
    rates = {name: median_rate(times, name, tokens) for name in sides}
    kept = {name: bytes_per_parameter(stage) for name, stage in stages.items()}
    ratios = {
        "ours": median_ratio(times, "qlora", "ours"),
        "ours_int8": median_ratio(times, "qlora", "ours_int8"),
    }
    print(
        table(
            [f"{TASKS} tasks x {BATCH} rows, all linear modules", "tokens/s", "over QLoRA", "bytes a weight"],
            [[name, rates[name], ratios.get(name), kept.get(name)] for name in sides],
        )
    )
    result: dict[str, Any] = {
        "vs_qlora": ratios["ours"],
        "bytes_per_parameter": kept["ours"],
        "int8_vs_qlora": ratios["ours_int8"],
        "int8_bytes_per_parameter": kept["ours_int8"],
        "tokens_per_second": rates,
        "tokens": sum(tokens),
        "tasks": TASKS,
        "batch": BATCH,
        "loss_difference": difference,
        "products": stages["ours"].products,
        "load": statistics.median(load),
    }
    print(last_line("quantised", result, repetitions=count, threads=options.threads, quick=options.quick))
    return 0


def agree(cut: Path, rows: Sequence[TokenRow]) -> None:
    """A few steps without dropout on a cut model, from the same adapters: each loss after an update must be the same."""
    setting = Setting(CHECKED_TASKS, TARGETS, dropout=0.0)
    ours, theirs = Ours(quantised_stage(cut, KINDS["ours"]), setting), PeftPadded(qlora_base(cut), setting)
    agree_without_dropout(ours, [theirs], rows, CHECKED_TASKS, TOLERANCE)


def quantised_stage(folder: Path, quantization: Quantization) -> Stage:
    freeze = freeze_of(quantization)
    assert freeze is not None
    return whole_stage(folder, DTYPE, freeze=freeze)


def qlora_base(folder: Path) -> Any:
    """As transformers quantises it with bitsandbytes, in training mode: in eval mode it would multiply in bfloat16 on some
    processors."""
    set_verbosity_error()
    disable_progress_bar()
    said = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=DTYPE,
    )
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=said, dtype=DTYPE, device_map="cpu", attn_implementation="sdpa"
    )
    model.requires_grad_(False)
    return model.train()


def bytes_per_parameter(stage: Stage) -> float:
    weights = [linear.weight for linear in stage.linears.values()]
    return sum(one.resident_bytes for one in weights) / sum(math.prod(one.shape) for one in weights)
