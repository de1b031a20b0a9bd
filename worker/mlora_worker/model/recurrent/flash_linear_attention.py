"""The scans of flash-linear-attention (https://github.com/fla-org/flash-linear-attention, package fla-core), in Triton.

Why a row's result does not depend on its neighbours, in version 0.6.0:

- A chunk is one program's, and so is a row's way from chunk to chunk. Rows are cut into chunks of 64 tokens from their own
  first token on (``chunks``), a chunk's last tokens are masked, and nothing is added atomically.
- Its kernels are tuned by timing a list of configurations, which could be others at the next start, and which add up in
  other orders. Here each kernel has one (``one_configuration``).
- It may hand a call on to other libraries, which cut long rows otherwise. That is switched off before it is imported.

No test has run it on a GPU. ``choice`` compares it there before it is taken.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from torch import Tensor

from mlora_worker.model.attention import PackedRows

_CHUNK = 64  # tokens
_NO_OTHERS = "FLA_DISABLE_BACKEND_DISPATCH"
_SCANS = ("fla.ops.gated_delta_rule", "fla.ops.simple_gla")
# What a kernel has if it may: more warps or stages need more shared memory than the smallest GPUs have.
_WARPS, _STAGES, _TILE = 4, 2, 64


class FlashLinearAttention:
    """Raises ImportError where the package is missing, or was imported before with its ways to other libraries open."""

    def __init__(self) -> None:
        if any(name.partition(".")[0] == "fla" for name in sys.modules) and os.environ.get(_NO_OTHERS) != "1":
            raise ImportError(f"fla was imported before {_NO_OTHERS} was set to 1")
        os.environ[_NO_OTHERS] = "1"
        rule, gla = (importlib.import_module(name) for name in _SCANS)
        self._delta_rule, self._gla = rule.chunk_gated_delta_rule, gla.chunk_simple_gla
        self.name = f"flash-linear-attention {importlib.import_module('fla').__version__}"
        one_configuration(module for name, module in sys.modules.items() if name.startswith("fla."))

    def delta_rule(
        self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, rows: PackedRows
    ) -> Tensor:
        """As ``Kernels.delta_rule``."""
        out: Tensor = self._delta_rule(
            query,
            key,
            value,
            g=decay,
            beta=beta,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=rows.boundaries,
            chunk_indices=rows.chunks(_CHUNK),
            chunk_size=_CHUNK,
        )[0]
        return out

    def scan(self, c: Tensor, b: Tensor, x: Tensor, decay: Tensor, rows: PackedRows) -> Tensor:
        """As ``Kernels.scan``. It asks the device for the number of chunks, so the host waits in each layer."""
        out: Tensor = self._gla(
            c,
            b,
            x,
            g=decay,
            scale=1.0,
            cu_seqlens=rows.boundaries,
            cu_seqlens_cpu=rows.boundaries_on_host,
            chunk_size=_CHUNK,
        )[0]
        return out


def one_configuration(modules: Iterable[ModuleType]) -> int:
    """Leave each tuned kernel of ``modules`` one configuration, always the same; returns how many kernels there are."""
    from triton.runtime.autotuner import Autotuner

    tuned: dict[int, Any] = {}
    for module in list(modules):
        for kernel in vars(module).values():
            while kernel is not None and hasattr(kernel, "run"):
                if isinstance(kernel, Autotuner):
                    tuned[id(kernel)] = kernel
                kernel = getattr(kernel, "fn", None)
    for kernel in tuned.values():
        kernel.configs = [min(kernel.configs, key=_distance)]
    return len(tuned)


def _distance(configuration: Any) -> tuple[float, ...]:
    """From what is wished for; of equals the first in the library's own list is nearest."""
    tiles = sum(abs(size - _TILE) for size in configuration.kwargs.values() if isinstance(size, int))
    return abs(configuration.num_warps - _WARPS), abs(configuration.num_stages - _STAGES), tiles
