"""Whether a stage may keep its weights packed for a library of products, which takes twice their bytes. Pure.

Operator and worker ask the same function of the same configuration: a plan before the start counts what a worker may take,
and a worker that a tight budget keeps from packing says so. What it took is in its report, and counts from then on.
"""

from __future__ import annotations

# Of a stage's budget, what packed weights may take at most. The rest is for adapters and activations: a task that would fit
# beside plain weights alone would never be admitted.
_SHARE = 0.4
# Kernels that the library keeps beside the weights, one for each product and number of rows; 64 at most
# (mlora_worker/__init__.py), of about 0.7 MiB (measured).
KERNEL_BYTES = 64 * 2**20
# Weights of a stage below which nothing is to be won, and a choice by time would be one by chance.
_FEWEST = 2**20


def may_pack(parameters: int, packed_bytes: int, budget: int | None) -> bool:
    """``parameters``: of the stage. ``packed_bytes``: what they take when they are packed. ``budget``: of the stage, bytes;
    None: not known."""
    return parameters >= _FEWEST and (budget is None or packed_bytes <= _SHARE * budget)
