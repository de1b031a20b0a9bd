"""Times the Triton kernels of the low-rank products with blocks of other sizes."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from bench.gpu.measure import seconds
from bench.report import table
from mlora_worker.lora.dropout import dropout_mask, token_keys
from mlora_worker.lora.groups import GroupSegment

REPETITIONS = 20


def compare(device: torch.device, *, tiny: bool) -> dict[str, Any]:
    """On q, k and v, and on a single wide module, of the 1B shape."""
    from mlora_worker.lora.triton_products import HALF, Tiles, TritonProducts

    usual = Tiles(tokens=16, columns=16, reduced=16, wide=32, chunk=32) if tiny else HALF
    choices = {"usual": usual, "2 stages": replace(usual, stages=2)}
    if not tiny:
        choices |= {
            "4 stages": replace(usual, stages=4),
            "8 warps": replace(usual, warps=8),
            "narrow": replace(usual, columns=32),
            "deep": replace(usual, reduced=128),
            "128 tokens": replace(usual, tokens=128),
            "32 tokens": replace(usual, tokens=32),
            "wide 64": replace(usual, wide=64),
            "wide 256": replace(usual, wide=256, warps=8),
            "chunk 512": replace(usual, chunk=512),
            "chunk 2048": replace(usual, chunk=2048),
        }
    groups = {"tiny": (10, 16, (16,))} if tiny else {
        "q,k,v": (1800, 2048, (2048, 512, 512)), "down": (1800, 8192, (2048,)), "gate,up": (1800, 2048, (8192, 8192)),
    }  # fmt: skip
    times: dict[str, dict[str, list[float]]] = {}
    for group, (tokens, inputs, outputs) in groups.items():
        work = {
            name: _work(TritonProducts(tiles), tokens, inputs, outputs, device)
            for name, tiles in choices.items()
        }
        times[group] = {name: _time(*parts, 1 if tiny else REPETITIONS) for name, parts in work.items()}
    lines = [
        [f"{group}: {name}", *(spent * 1e6 for spent in own)]
        for group, named in times.items()
        for name, own in named.items()
    ]
    print(table(["blocks", "forward, µs", "backward, µs"], lines))
    return {"tiles": times}


def _work(
    products: Any, tokens: int, inputs: int, outputs: tuple[int, ...], device: torch.device
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Forward and backward of eight tasks of rank 16 with dropout, ``tokens`` each."""
    dtype = torch.bfloat16
    segments = []
    for task in range(8 if tokens > 100 else 2):
        a = torch.randn(16 * len(outputs), inputs, device=device).to(dtype)
        b = tuple(torch.randn(width, 16, device=device).to(dtype) for width in outputs)
        segments.append(
            GroupSegment(
                rows=slice(task * tokens, (task + 1) * tokens),
                rank=16,
                members=tuple(range(len(outputs))),
                a=a,
                b=b,
                grad_a=torch.zeros_like(a, dtype=torch.float32),
                grad_b=tuple(torch.zeros_like(one, dtype=torch.float32) for one in b),
                scale=2.0,
                weight=1.0,
                mask=dropout_mask(token_keys(task, 1, 0, (tokens,)), "m", inputs, 0.05),
            )
        )
    total = tokens * len(segments)
    x = torch.randn(total, inputs, device=device).to(dtype)
    ys = [torch.randn(total, width, device=device).to(dtype) for width in outputs]
    grad_x = torch.zeros_like(x)
    (prepared,) = products.prepare([segments])
    saved = products.forward(x, ys, prepared)
    return (
        lambda: products.forward(x, ys, prepared),
        lambda: products.backward(x, ys, grad_x, prepared, saved),
    )


def _time(forward: Callable[[], object], backward: Callable[[], object], repetitions: int) -> list[float]:
    """Median seconds of each, called ten times in a row so that launches overlap."""
    calls = 10 if repetitions > 1 else 1

    def several(work: Callable[[], object]) -> None:
        for _ in range(calls):
            work()

    medians = []
    for work in (forward, backward):
        several(work)
        spent = [seconds(lambda work=work: several(work)) / calls for _ in range(repetitions)]  # type: ignore[misc]
        medians.append(statistics.median(spent))
    return medians
