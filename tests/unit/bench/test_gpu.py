"""The GPU benchmarks' figures, and that their kernels' timing runs (in Triton's interpreter)."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.gpu import session, tiles
from bench.gpu.measure import peak_flops, useful_flops
from bench.gpu.rows import deal, rows
from bench.rows import Batch
from mlora_worker.data.prepare import IGNORED, TokenRow
from mlora_worker.model.architecture import Architecture, Linear
from tests.fixtures.group_cases import DEVICE

Q = Linear("model.layers.0.self_attn.q_proj", 0, 8, 8, "self_attn.q_proj")
UP = Linear("model.layers.0.mlp.up_proj", 0, 8, 32, "mlp.up_proj")
ARCHITECTURE = Architecture(8, 32, 1, 2, 100, 64, True, (Q, UP))


def test_rows_are_about_as_long_as_gsm8k_s() -> None:
    made = rows(500, 1000)
    tokens = [len(row.ids) for row in made]
    supervised = sum(int((row.labels != IGNORED).sum()) for row in made)
    assert 180 < np.mean(tokens) < 260
    assert 0.4 < supervised / sum(tokens) < 0.7
    batch = deal(made, 4)
    assert [len(own) for own in batch.rows] == [125] * 4


def test_useful_operations_are_counted_by_hand() -> None:
    labels = np.array([IGNORED, 1, 2, IGNORED], np.int32)
    batch = Batch(((TokenRow(np.zeros(4, np.int32), labels),),))
    base, head, attention = 4 * (64 + 256) * 4, 4 * 8 * 100 * 2, 6 * 16 * 8
    assert useful_flops(ARCHITECTURE, batch, 2, ("q_proj",)) == base + head + attention + 6 * 2 * 16 * 4
    assert useful_flops(ARCHITECTURE, batch, 2, ("all-linear",)) == base + head + attention + 6 * 2 * 56 * 4


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("Other", None),
    ],
)
def test_the_peak_of_a_device_goes_by_its_name(name: str, peak: float | None) -> None:
    assert peak_flops(name) == peak


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the benchmark itself runs there")
def test_blocks_are_compared() -> None:
    assert set(tiles.compare(torch.device("cpu"), tiny=True)["tiles"]["tiny"]) == {"usual", "2 stages"}


def test_a_step_that_fails_or_hangs_costs_its_own_result_only(tmp_path: Path) -> None:
    steps = {
        "good": session.Step("good", ("-c", "print('{}')"), 30, "look"),
        "bad": session.Step("bad", ("-c", "raise SystemExit('why')"), 30, "look"),
        "slow": session.Step(
            "slow", ("-c", "import time; print('begun', flush=True); time.sleep(60)"), 1, "look"
        ),
    }
    results = {name: session.run(step, step.limit, tmp_path, dry_run=True) for name, step in steps.items()}
    assert {name: result["exit"] for name, result in results.items()} == {"good": 0, "bad": 1, "slow": 124}
    assert "why" in results["bad"]["tail"]
    assert "begun" in results["slow"]["tail"]
    whole = session.summary(results, True, 1.0)
    assert whole["ok"] == {"good": True, "bad": False, "slow": False}
    json.dumps(whole)


def test_a_benchmark_that_is_stopped_leaves_its_figures_and_no_process(tmp_path: Path) -> None:
    alive = tmp_path / "alive"
    child = f"import pathlib, time; time.sleep(4); pathlib.Path({str(alive)!r}).touch()"
    code = (
        "import json, subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        "print(json.dumps({'tokens_per_second': {'ours': 7}, 'partial': True}), flush=True)\n"
        "print('and then', flush=True)\n"
        "time.sleep(60)\n"
    )
    result = session.run(session.Step("8b", ("-c", code), 2, "look"), 2, tmp_path, dry_run=True)
    assert (result["ok"], result["exit"]) == (False, 124)
    assert session.summary({"8b": result}, True, 1.0)["figures"]["8b"]["tokens_per_second"] == {"ours": 7}
    assert "and then" in (tmp_path / "gpu.log").read_text()
    time.sleep(3)
    assert not alive.exists()


def test_the_session_starts_where_packages_are_missing() -> None:
    """So that it can say which; -S hides all that is installed."""
    code = "import sys; sys.path.insert(0, '.'); import bench.gpu.session; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-S", "-c", code], check=True)
