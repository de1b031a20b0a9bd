"""Other forms of the same work on one GPU: a base in 8 and in 4 bits beside the plain one, and pairs beside rows."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from typing import Any

import torch

from bench import preference
from bench.gpu.base import random_stage
from bench.gpu.measure import peak_gib, seconds
from bench.gpu.rows import SHORTEN_TINY, deal, rows
from bench.ours import Ours
from bench.report import table
from bench.sides import LEARNING_RATE, Setting
from mlora_worker.frozen.four_bits import available
from mlora_worker.frozen.linear import Freeze
from mlora_worker.frozen.plain import PlainWeight
from mlora_worker.model.quantisation import freeze_of
from mlora_worker.protocol import Quantization

TASKS, ROWS, TARGETS = 8, 64, ("all-linear",)


def compare(
    shape: str, repetitions: int, device: torch.device, say: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """``say`` is given each figure when it is there."""
    shorter = SHORTEN_TINY if shape == "tiny" else 1
    forms: dict[str, Freeze | None] = {"plain": PlainWeight, "int8": freeze_of(Quantization(type="int8"))}
    if available():
        forms["nf4"] = freeze_of(Quantization(type="nf4"))
    result: dict[str, Any] = {"model": shape, "tokens_per_second": {}, "peak_gib": {}, "nf4": available()}

    def note(name: str, tokens: int, work: Callable[[], object]) -> None:
        work()  # compiles, and makes the optimizers' state
        result["peak_gib"][name] = peak_gib(work)
        spent = statistics.median(seconds(work) for _ in range(repetitions))
        result["tokens_per_second"][name] = tokens / spent
        say(result)

    for name, freeze in forms.items():
        assert freeze is not None
        stage, config = random_stage(shape, torch.bfloat16, device, freeze)
        batch = deal(rows(ROWS, config.vocab_size, shorter=shorter), TASKS)
        ours = Ours(stage, Setting(TASKS, TARGETS), budget=2**30)
        note(name, batch.tokens, lambda ours=ours, batch=batch: ours.step(batch, LEARNING_RATE))  # type: ignore[misc]
        if name == "plain":
            note("dpo", *_pairs(stage, config.vocab_size, shorter))
        del stage, ours
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print(
        table(
            ["", "tokens/s", "peak GiB"],
            [[name, rate, result["peak_gib"][name]] for name, rate in result["tokens_per_second"].items()],
        )
    )
    return result


def _pairs(stage: Any, vocabulary: int, shorter: int) -> tuple[int, Callable[[], object]]:
    """Tokens and the work of steps of DPO whose reference is known."""
    ours = preference.Ours(stage, Setting(preference.TASKS, TARGETS))
    ours.begin()
    each = preference.BATCH * preference.STEPS
    pairs = preference.pairs_of(rows(preference.TASKS * each, vocabulary, shorter=shorter))
    tasks = [pairs[task * each : (task + 1) * each] for task in range(preference.TASKS)]
    references = [ours.refer(own) for own in tasks]

    def work() -> None:
        ours.begin()
        ours.train(tasks, references)

    return sum(len(row.ids) for own in tasks for row in own), work
