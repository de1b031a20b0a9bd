"""Devices, by their vendors' data sheets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Device:
    flops: float  # dense bfloat16 operations per second
    bandwidth: float  # bytes per second of its memory
    memory: float  # bytes


DEVICES = {
    "h100": Device(989e12, 3.35e12, 80e9),  # SXM
    "h200": Device(989e12, 4.8e12, 141e9),
    "a100": Device(312e12, 2.04e12, 80e9),  # SXM, 80 GB
    "l40s": Device(362e12, 0.864e12, 48e9),
}
