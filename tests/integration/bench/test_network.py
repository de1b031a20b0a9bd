"""The peers of ``bench network`` train what this project trains: same losses, so their gradients are right, too."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from bench.base import smollm2_folder
from bench.network.base import network_folder
from bench.network.link import available
from bench.network.sides import FAMILIES, Family
from bench.peers.schedule_rank import Job, Order
from bench.peers.started import peer_ranks
from bench.ranks import Placement, free_ports

STEPS = (1, 2, 3)
LOOPBACK = Placement(environments=({"GLOO_SOCKET_IFNAME": "lo"},) * 2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return network_folder(smollm2_folder(), tmp_path_factory.mktemp("model"), layers=2)


def losses(family: Family, kind: str, model: Path, logs: Path) -> dict[str, float]:
    job = Job(
        folder=model, family=family, tasks=1, targets=("q_proj", "o_proj", "up_proj", "down_proj"), dropout=0.0, start=0.01,
        batch=2, microbatches=2, layers=((0, 1), (1, 2)), most_steps=len(STEPS), port=free_ports(1)[0], threads=1,
    )  # fmt: skip
    with peer_ranks(job, logs, LOOPBACK) as ranks:
        return ranks.run(Order(kind=kind, steps=STEPS)).losses


def test_all_peers_have_the_same_losses_over_several_steps(model: Path, tmp_path: Path) -> None:
    kinds = {
        family: next(kind for kind, own in FAMILIES.items() if own == family) for family in get_args(Family)
    }
    found = {family: losses(family, kind, model, tmp_path / family) for family, kind in kinds.items()}
    for family in ("sharded", "tensor_parallel"):
        assert found[family] == pytest.approx(found["schedules"], rel=1e-4)


@pytest.mark.skipif(not available(), reason="a network namespace needs root, ip and tc")
def test_a_slow_link_slows_peers_and_not_this_project() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench", "network", "--quick", "--tasks", "2"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    for side, over in figures["bytes_over_formula"].items():
        assert 0.9 < over < 1.15, side
    assert figures["vs_fsdp"]["200 Mb/s"] > 1
