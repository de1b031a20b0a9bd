"""Whether a stage on a CPU may multiply by another library than torch's own. Pure.

Operator and worker ask the same function of the same configuration: a plan before the start counts what a worker may take,
and what it took is in its report, and counts from then on.
"""

from __future__ import annotations

# Kernels that the library keeps, one for each product and number of rows; 256 at most (mlora_worker/__init__.py), of about
# 0.7 MiB (measured).
KERNEL_BYTES = 192 * 2**20
# Of a stage's budget, what they may take. Where they would take more, the memory is for the tasks.
_SHARE = 0.1
# Weights of a model below which a choice by time would be one by chance, and kernels for each new number of rows (0.6 ms
# each, measured) would take as long as the products.
_FEWEST = 2**24


def may_choose(parameters: int, budget: int | None) -> bool:
    """``parameters``: of the whole model, so that its stages choose alike, however it is cut. ``budget``: of the stage,
    bytes; None: not known."""
    return parameters >= _FEWEST and (budget is None or _SHARE * budget >= KERNEL_BYTES)
