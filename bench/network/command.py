"""``python -m bench network``: two ranks on either side of a link, at several rates, against peers on the same link.

The peers are GPipe and 1F1B of torch.distributed.pipelining, FSDP2 (``fsdp``: each layer's shards are gathered) and tensor
parallelism (``tp``: every layer is cut between the ranks). Same model, rows, rank and learning rate, one thread a process.
Peers train their tasks one after the other, so one step of one task shows their pace. Needs root, for a network namespace.

``slowdown``    of this project, where all its messages take 20 % of the time that it computes: tokens per second without
                a limit over those at that rate
``vs_...``      this project's tokens per second over the peer's, by rate
``bytes_over_formula``  bytes that each side sent, as the kernel counts them, over what its method needs
``computed``    seconds that messages take for 4,096 tokens of larger models in bfloat16 on four ranks, by formula
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from bench.base import smollm2_folder
from bench.baselines import check_first_losses
from bench.network import formulae
from bench.network.base import network_folder, sizes
from bench.network.link import Link, link
from bench.network.sides import FAMILIES, RANKS, WARM, Measured, Ours, Peer, ours, peer
from bench.options import parser, repetitions
from bench.peers.schedule_rank import Job
from bench.ranks import Placement
from bench.report import last_line, table
from bench.rows import gsm8k_rows
from bench.sides import Setting, in_turns

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
RATES: tuple[float | None, ...] = (None, 10e9, 1e9, 200e6, 50e6)  # bits per second
SHARE, GOAL = 0.20, 1.05  # of the computing time; the slowdown
WIDTH = 4  # bytes of a float32


def main(arguments: list[str]) -> int:
    made = parser("network", __doc__)
    made.add_argument("--tasks", type=int, default=4)
    made.add_argument("--batch", type=int, default=2, help="rows of each task's step (default: 2)")
    made.add_argument(
        "--steps", type=int, default=None, help="of this project's tasks, measured (default: 3)"
    )
    options = made.parse_args(arguments)
    steps = options.steps or (1 if options.quick else 3)
    count = repetitions(options, usual=1, long=3)
    setting = Setting(options.tasks, TARGETS)
    rates = (None, 200e6) if options.quick else RATES
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        scratch = Path(name)
        folder = network_folder(smollm2_folder(), scratch / "model", 2 if options.quick else None)
        rows = gsm8k_rows(folder)
        shaped = stack.enter_context(link())
        own = stack.enter_context(ours(folder, shaped, rows, scratch, options.threads))
        job = partial(_job, folder, setting, options.batch, own.layers(), options.threads)
        peers = {
            family: stack.enter_context(peer(family, job, shaped, rows, scratch))
            for family in dict.fromkeys(FAMILIES.values())
        }
        theirs = {kind: losses for one in peers.values() for kind, losses in one.first.items()}
        # One adapter serves all tasks of some peers, so only the first task's is new there.
        first = {key: loss for key, loss in own.first_losses(setting, options.batch).items() if key == "0/1"}
        check_first_losses(first, theirs)
        found = [
            _at_rates(own, peers, shaped, setting, options.batch, steps, rates, turn) for turn in range(count)
        ]
        slow = _slowdown(
            own, shaped, setting, options.batch, steps, found, pairs=1 if options.quick else count + 2
        )
        model = sizes(folder, TARGETS, setting.rank)
    figures = {
        **_ratios(found),
        **slow,
        "bytes_over_formula": _over(found, model, options.batch),
        "computed": larger(),
    }
    print(last_line("network", figures, repetitions=count, threads=options.threads, quick=options.quick))
    return 0


Found = dict[tuple[str, str], Measured]  # by rate and side


def _at_rates(
    own: Ours,
    peers: dict[Any, Peer],
    shaped: Link,
    setting: Setting,
    batch: int,
    steps: int,
    rates: Sequence[float | None],
    turn: int,
) -> Found:
    found: Found = {}
    for rate in rates:
        shaped.shape(rate)
        for side in in_turns(("ours", *FAMILIES), turn):
            theirs = side != "ours"
            measured = peers[FAMILIES[side]].train(side, 1, 1) if theirs else own.train(setting, batch, steps)
            found[named(rate), side] = measured
            print(
                f"{named(rate):10}{side:8}{measured.rate:9.1f} tokens/s  {measured.bytes_per_token:12,.0f} bytes a token"
            )
    return found


def _slowdown(
    own: Ours, shaped: Link, setting: Setting, batch: int, steps: int, found: Sequence[Found], pairs: int
) -> dict[str, Any]:
    """At the rate at which all messages, one after the other, take ``SHARE`` of a step's time without a limit."""
    free = [turn["no limit", "ours"] for turn in found]
    rate = 8 * statistics.median(one.rate * one.bytes_per_token for one in free) / SHARE
    times = []
    for turn in range(pairs):
        pair: dict[str, float] = {}
        for side in in_turns(("free", "shaped"), turn):
            shaped.shape(rate if side == "shaped" else None)
            pair[side] = own.train(setting, batch, steps).rate
        times.append(pair["free"] / pair["shaped"])
    return {"slowdown": statistics.median(times), "slowdown_goal": GOAL, "slowdown_bits_per_second": rate}


def _ratios(found: Sequence[Found]) -> dict[str, Any]:
    rates = list(dict.fromkeys(rate for rate, _ in found[0]))
    pace = {
        rate: {
            side: statistics.median(turn[rate, side].rate for turn in found) for side in ("ours", *FAMILIES)
        }
        for rate in rates
    }
    print(table(["tokens/s", "ours", *FAMILIES], [[rate, *pace[rate].values()] for rate in rates]))
    return {
        **{
            f"vs_{side}": {rate: pace[rate]["ours"] / pace[rate][side] for rate in rates} for side in FAMILIES
        },
        "tokens_per_second": pace,
    }


def _over(found: Sequence[Found], model: formulae.Model, batch: int) -> dict[str, float]:
    """Of the first turn's last rate: headers weigh the same at each."""
    last = {side: measured for (_, side), measured in found[0].items()}
    needed = {
        "ours": formulae.pipeline(model, RANKS, last["ours"].carried, WIDTH),
        "gpipe": formulae.pipeline(model, RANKS, last["gpipe"].carried, WIDTH),
        "1f1b": formulae.pipeline(model, RANKS, last["1f1b"].carried, WIDTH),
        "fsdp": formulae.sharded(model, RANKS, batch // RANKS, WIDTH),
        "tp": formulae.tensor_parallel(model, RANKS, last["tp"].carried, WIDTH),
    }
    over = {side: last[side].bytes / need for side, need in needed.items()}
    print(
        table(
            ["bytes", "sent", "needed", "over"], [[s, last[s].bytes, round(needed[s]), over[s]] for s in over]
        )
    )
    return over


LARGER = {  # hidden size, layers, parameters of the layers and of the rest
    "8b": formulae.Model(4096, 32, 6_979_321_856, 1_050_673_152, 20_971_520),
    "70b": formulae.Model(8192, 80, 68_452_352_000, 2_101_346_304, 103_546_880),
}


def larger() -> dict[str, dict[str, dict[str, float]]]:
    """Seconds of messages for 4,096 tokens on four ranks in bfloat16, one direction's share of a full-duplex link each."""
    ranks, tokens, width = 4, 4096, 2
    return {
        name: {
            f"{gigabits} Gb/s": {
                side: needed * 8 / (gigabits * 1e9) / ranks
                for side, needed in (
                    ("pipeline", formulae.pipeline(model, ranks, tokens, width)),
                    ("tp", formulae.tensor_parallel(model, ranks, tokens, width)),
                    ("fsdp", formulae.sharded(model, ranks, 1, width)),
                )
            }
            for gigabits in (10, 100)
        }
        for name, model in LARGER.items()
    }


def _job(
    folder: Path,
    setting: Setting,
    batch: int,
    layers: tuple[tuple[int, int], ...],
    threads: int,
    placement: Placement,
    port: int,
) -> Job:
    return Job(
        folder=folder, host=placement.host, tasks=setting.tasks, targets=setting.targets, batch=batch, microbatches=batch,
        layers=layers, most_steps=WARM + 4, port=port, threads=threads,
    )  # fmt: skip


def named(rate: float | None) -> str:
    if rate is None:
        return "no limit"
    return f"{rate / 1e9:g} Gb/s" if rate >= 1e9 else f"{rate / 1e6:g} Mb/s"
