"""Routed experts on one GPU: torch's grouped product beside the loop over experts, on the shape of Qwen3-30B-A3B."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from bench.gpu.measure import kernels, seconds
from bench.report import table
from mlora_worker.frozen.experts import FrozenExperts, SegmentTokens
from mlora_worker.frozen.grouped import grouped_where_it_can
from mlora_worker.frozen.plain import PlainWeight

EXPERTS, CHOSEN, SIZE, WIDTH, TOKENS = 128, 8, 2048, 768, 3552
TINY = (4, 2, 16, 24, 20)


def compare(
    repetitions: int, device: torch.device, say: Callable[[dict[str, Any]], None], *, tiny: bool
) -> dict[str, Any]:
    """Milliseconds of forward and backward of one layer's experts. ``say`` is given each figure when it is there."""
    count, k, size, width, tokens = TINY if tiny else (EXPERTS, CHOSEN, SIZE, WIDTH, TOKENS)
    generator = torch.Generator(device).manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).div_(shape[-1] ** 0.5).bfloat16()

    parts = [
        [PlainWeight(drawn(*shape)) for _ in range(count)]
        for shape in ((width, size), (width, size), (size, width))
    ]
    gate, up, down = parts
    loop = FrozenExperts(gate, up, down, lambda gate, up: silu(gate) * up, SegmentTokens())
    hidden = drawn(tokens, size)
    weights, chosen = torch.rand(tokens, count, generator=generator, device=device).topk(k, dim=1)
    weights = weights.bfloat16()
    result: dict[str, Any] = {"ms": {}, "launches": {}}

    def note(name: str, experts: FrozenExperts) -> None:
        def work() -> None:
            leaf = hidden.clone().requires_grad_()
            y = experts(leaf, chosen, weights)
            y.backward(y.detach())

        work()
        result["ms"][name] = 1e3 * statistics.median(seconds(work) for _ in range(repetitions))
        result["launches"][name] = kernels(work).count
        say(result)

    note("loop", loop)
    taken = grouped_where_it_can(loop)
    result["grouped_taken"] = taken is not loop
    if taken is not loop:
        note("grouped", taken)
    print(
        table(
            [f"{count} experts, {tokens} tokens", "ms", "launches"],
            [[name, ms, result["launches"][name]] for name, ms in result["ms"].items()],
        )
    )
    return result
