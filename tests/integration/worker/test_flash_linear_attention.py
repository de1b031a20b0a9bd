"""flash-linear-attention in a process of its own, where Triton is interpreted from the first import on."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest


def test_its_scans_equal_torchs_row_by_row_and_know_no_neighbours() -> None:
    try:
        version("fla-core")
    except PackageNotFoundError:
        pytest.skip("fla-core is not installed")
    command = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider"]
    command += ["-p", "tests.fixtures.small_models", str(Path(__file__).with_name("scans.py"))]
    done = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout
