"""``bench/gpu.sh`` goes all the way without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration


def test_the_dry_run_takes_every_step_and_writes_one_json(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bench/gpu.sh", "--dry-run"],
        env=os.environ | {"OUT": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result == json.loads((tmp_path / "gpu.json").read_text())
    assert result["dry_run"]
    assert all(result["ok"].values())
    assert result["steps"]["tests"]["passed"] > 20
    assert set(result["figures"]["1b"]["tokens_per_second"]) == {"ours", "peft", "packed"}
