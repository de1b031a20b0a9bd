"""This project's two ranks and those of the peers, one on either side of the link; each trains when it is told to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bench.network.link import Link
from bench.peers.schedule_rank import Job, Order
from bench.peers.started import PeerRanks, peer_ranks
from bench.ranks import Placement, Ranks, free_ports, task_plans, training
from bench.rows import pad
from bench.sides import LEARNING_RATE, Setting
from bench.steady import run_window
from mlora_worker.data.prepare import TokenRow
from mlora_worker.data.training_rows.step_order import StepPlan
from mlora_worker.protocol import Report

RANKS, WARM = 2, 1
Family = Literal["schedules", "sharded", "tensor_parallel"]
FAMILIES: dict[str, Family] = {
    "gpipe": "schedules",
    "1f1b": "schedules",
    "fsdp": "sharded",
    "tp": "tensor_parallel",
}


@dataclass(frozen=True, slots=True)
class Measured:
    tokens: int  # real ones, whose time was taken
    seconds: float
    bytes: int  # sent while ``carried`` tokens were trained
    carried: int

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    @property
    def bytes_per_token(self) -> float:
        return self.bytes / self.carried


class Ours:
    def __init__(self, ranks: Ranks, link: Link, rows: Sequence[TokenRow], scratch: Path) -> None:
        self._ranks, self._link, self._rows, self._scratch = ranks, link, rows, scratch
        self._runs = 0

    def layers(self) -> tuple[tuple[int, int], ...]:
        """Of each stage: its first, and one after its last."""
        self._ranks.plan([])
        stages = self._ranks.wait_for(lambda _: True).stages
        return tuple((stage.first_layer, stage.last_layer + 1) for stage in stages)

    def train(self, setting: Setting, batch: int, steps: int) -> Measured:
        """All tasks at once; ``steps`` of the first one, once the pipeline is full."""
        self._runs += 1
        plans = task_plans(
            setting, batch, WARM + steps + 2, LEARNING_RATE, f"run-{self._runs}", self._scratch
        )
        before, carried = self._link.sent(), self._carried()
        window = run_window(self._ranks, plans, self._rows, WARM, steps)
        sent, after = self._link.sent(), self._carried()
        return Measured(window.tokens, window.seconds, sent - before, after - carried)

    def first_losses(self, setting: Setting, batch: int) -> dict[str, float]:
        """Of each task's first step, as "task/step"."""
        plans = task_plans(setting, batch, 1, LEARNING_RATE, "first", self._scratch)
        self._ranks.plan(plans)
        seen: dict[str, float] = {}

        def done(report: Report) -> bool:
            ended = [one for one in report.tasks if one.step and one.loss is not None]
            seen.update(
                {f"{one.uid.rpartition('-')[2]}/1": one.loss for one in ended if one.loss is not None}
            )
            return len(seen) == len(plans)

        self._ranks.wait_for(done)
        self._ranks.plan([])
        self._ranks.wait_for(lambda report: not report.tasks)
        return seen

    def _carried(self) -> int:
        return self._ranks.wait_for(lambda _: True).wire.tokens


class Peer:
    """One family; tasks train one after the other."""

    def __init__(
        self,
        ranks: PeerRanks,
        link: Link,
        rows: Sequence[TokenRow],
        plans: Sequence[StepPlan],
        kinds: Sequence[str],
    ) -> None:
        self._ranks, self._link, self._rows, self._plans = ranks, link, rows, plans
        # By kind and "task/step"; with new adapters for each.
        self.first = {kind: ranks.run(Order(kind=kind, steps=(1,), fresh=True)).losses for kind in kinds}

    def train(self, kind: str, steps: int, tasks: int) -> Measured:
        before = self._link.sent()
        order = Order(kind=kind, steps=tuple(range(WARM + 1, WARM + steps + 1)), tasks=tasks)
        answer = self._ranks.run(order)
        sent = self._link.sent() - before
        done = [
            [self._rows[i] for i in plan.rows_of_step(step)]
            for plan in self._plans[:tasks]
            for step in order.steps
        ]
        real = sum(len(row.ids) for rows in done for row in rows)
        carried = sum(pad(rows).ids.numel() for rows in done) if FAMILIES[kind] == "schedules" else real
        return Measured(real, answer.seconds, sent, carried)


@contextmanager
def ours(folder: Path, link: Link, rows: Sequence[TokenRow], scratch: Path, threads: int) -> Iterator[Ours]:
    with Ranks(folder, RANKS, scratch / "ours", threads, placement=link.placement) as ranks:
        yield Ours(ranks, link, rows, scratch)


@contextmanager
def peer(
    family: Family, job: Callable[[Placement, int], Job], link: Link, rows: Sequence[TokenRow], scratch: Path
) -> Iterator[Peer]:
    """``job``: what its ranks are to do, given where they run and a port."""
    placement = link.placement
    made = job(placement, free_ports(1, placement.host)[0]).model_copy(update={"family": family})
    plans = [
        StepPlan(len(rows), training(made.batch, task, made.most_steps, LEARNING_RATE))
        for task in range(made.tasks)
    ]
    kinds = [kind for kind, own in FAMILIES.items() if own == family]
    with peer_ranks(made, scratch / family, placement) as ranks:
        yield Peer(ranks, link, rows, plans, kinds)
