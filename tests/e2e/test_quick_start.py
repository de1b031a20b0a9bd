"""The quick start as a newcomer runs it, on the real model and real rows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures.cluster import Cluster

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(1500)
def test_the_demonstration_ends_with_adapters_better_than_the_base(cluster: Cluster, smollm2: Path) -> None:
    """Exit code 0 means: three adapters, each at least 20 % below the base's held-out loss, PEFT's logits equal."""
    if cluster.own is None:
        pytest.skip("the demonstration is for the project's own cluster")
    assert smollm2.exists()
    ended = subprocess.run(
        [sys.executable, "-m", "examples.demo", "--end"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-4000:]
    for words in ("math-small", "math-attention", "math-all", "tasks in the pipeline at once: 3"):
        assert words in ended.stdout
    assert "= 1.000 of" in ended.stdout, "bytes between stages are those of the formula"
    sys.stdout.write(ended.stdout[-3000:])
