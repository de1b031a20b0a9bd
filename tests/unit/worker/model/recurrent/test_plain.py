"""Whatever of the worker is imported, no other library's kernels come with transformers' files."""

from __future__ import annotations

import subprocess
import sys

import pytest

_IMPORTED = """
import importlib, sys

looked_for = []

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("fla", "causal_conv1d", "mamba_ssm"):
            looked_for.append(name)

sys.meta_path.insert(0, Watch())
importlib.import_module(sys.argv[1])
assert not looked_for, looked_for
"""


@pytest.mark.parametrize("module", ["model.load", "model.steady", "rank.first"])
def test_nothing_looks_for_another_librarys_kernels(module: str) -> None:
    """flash-linear-attention is imported by what switches off its ways to other libraries before."""
    subprocess.run([sys.executable, "-c", _IMPORTED, f"mlora_worker.{module}"], check=True, timeout=120)
