"""Figures of a device: time, memory, kernels, and how much of its arithmetic was used."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench.rows import Batch
from mlora_worker.model.architecture import Architecture

# Dense bfloat16 or float16 operations per second, by the vendor's data sheets; the first name that fits counts.
PEAKS = (
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("H200", 989e12),
    ("GH200", 989e12),
    ("A100", 312e12),
)


def peak_flops(device_name: str) -> float | None:
    """None where the device is not known."""
    return next((peak for name, peak in PEAKS if name in device_name), None)


def useful_flops(architecture: Architecture, batch: Batch, rank: int, adapted: Sequence[str]) -> float:
    """Operations that one optimizer step of all tasks needs, whoever does it: two per multiply and add.

    Forward and input gradient of the frozen linears (their weights need none), the head at supervised tokens, causal
    attention (two products forward, four backward, half of the square), and the six products of each low-rank pair.
    Nothing is counted for norms, activations, padding, or what is computed twice.
    """
    tokens, supervised = batch.tokens, sum(batch.supervised)
    linears = sum(linear.in_features * linear.out_features for linear in architecture.linears)
    pairs = sum(
        rank * (linear.in_features + linear.out_features)
        for linear in architecture.linears
        if "all-linear" in adapted or linear.name in adapted
    )
    heads = next(one.out_features for one in architecture.linears if one.name == "q_proj")
    squares = sum(len(row.ids) ** 2 for rows in batch.rows for row in rows)
    attention = 6 * squares * heads * architecture.layers
    head = 4 * architecture.hidden_size * architecture.vocab_size * supervised
    return float(4 * linears * tokens + head + attention + 6 * pairs * tokens)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(work: Callable[[], object]) -> float:
    synchronize()
    began = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - began


def peak_gib(work: Callable[[], object]) -> float | None:
    """Largest allocation while ``work`` runs, shared weights included; None without a GPU."""
    if not torch.cuda.is_available():
        work()
        return None
    synchronize()
    torch.cuda.reset_peak_memory_stats()
    work()
    synchronize()
    return torch.cuda.max_memory_allocated() / 2**30


@dataclass(frozen=True)
class Kernels:
    """What a piece of work ran on the device; on a CPU its operators stand for kernels."""

    count: int
    busy: float  # seconds
    top: list[dict[str, Any]]  # name, calls, milliseconds, share


def kernels(work: Callable[[], object], most: int = 20) -> Kernels:
    cuda = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities) as profiler:
        work()
        synchronize()
    times: dict[str, list[float]] = {}
    for event in profiler.events() or ():
        if cuda and event.device_type is DeviceType.CUDA and not event.is_user_annotation:
            times.setdefault(event.name, []).append(event.time_range.elapsed_us())
        elif not cuda and event.name.startswith("aten::"):
            times.setdefault(event.name, []).append(event.self_cpu_time_total)
    total = sum(sum(own) for own in times.values()) or 1.0
    heaviest = sorted(times.items(), key=lambda item: -sum(item[1]))[:most]
    return Kernels(
        count=sum(len(own) for own in times.values()),
        busy=total / 1e6,
        top=[
            {"name": name[:100], "calls": len(own), "ms": sum(own) / 1e3, "share": sum(own) / total}
            for name, own in heaviest
        ],
    )
