"""Devices, by their vendors' data sheets."""

from __future__ import annotations

from dataclasses import dataclass

from bench.gpu.measure import PEAKS


@dataclass(frozen=True, slots=True)
class Device:
    flops: float  # dense bfloat16 operations per second
    bandwidth: float  # bytes per second of its memory
    memory: float  # bytes


_PEAKS = dict(PEAKS)
DEVICES = {
    "h100": Device(_PEAKS["H100"], 3.35e12, 80e9),  # SXM
    "h200": Device(_PEAKS["H200"], 4.8e12, 141e9),
    "a100": Device(_PEAKS["A100"], 2.04e12, 80e9),  # SXM, 80 GB
    "l40s": Device(362e12, 0.864e12, 48e9),
}
