"""Ranks of the peers, started and told what to train."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench.peers.schedule_rank import ANSWER, Answer, Job, Order
from bench.ranks import ON_LOOPBACK, Placement, logs_of, processes


@contextmanager
def peer_ranks(job: Job, logs: Path, placement: Placement = ON_LOOPBACK) -> Iterator[PeerRanks]:
    """A rank for each range of layers of ``job``. ``logs``: a folder to make."""
    logs.mkdir()
    environments = [
        {"BENCH_JOB": job.model_dump_json(), "BENCH_RANK": str(rank), "OMP_NUM_THREADS": str(job.threads)}
        for rank in range(len(job.layers))
    ]
    command = [sys.executable, "-m", "bench.peers.schedule_rank"]
    with processes(command, environments, logs, talk=True, placement=placement) as started:
        yield PeerRanks(started, logs)


class PeerRanks:
    """The started ranks of the peers, which wait for orders."""

    def __init__(self, started: Sequence[subprocess.Popen[str]], logs: Path) -> None:
        self._ranks, self._logs = started, logs
        for rank in started:
            self._answer(rank)

    def run(self, order: Order) -> Answer:
        """Of the last rank, which knows the losses; the time is that of the slowest one."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(order.model_dump_json() + "\n")
            rank.stdin.flush()
        answers = [Answer.model_validate_json(self._answer(rank)) for rank in self._ranks]
        return Answer(seconds=max(answer.seconds for answer in answers), losses=answers[-1].losses)

    def _answer(self, rank: subprocess.Popen[str]) -> str:
        assert rank.stdout is not None
        for line in rank.stdout:  # torch writes there, too
            if line.startswith(ANSWER):
                return line.removeprefix(ANSWER)
        raise RuntimeError(f"a rank of the peers ended\n{logs_of(self._logs)}")
