"""``python -m bench chaos``: tasks train while their workers, their operator and their store fail again and again.

**Real**: the ranks (``mlora_worker`` with its links over loopback), the operator's reconcile loop and its HTTP client in a
process of its own, a SeaweedFS server. **Stands in**: for the API server, objects in this process that are written with a
version, as the real one asks for; for the kubelet, this process, which starts a rank that ended again in its pod, and a
new pod for one that was deleted; both are reached by the operator over a local socket. Ranks and operators are forked from
a process that has imported everything (``chaos_parts/nursery.py``). All requests to the store go through a proxy whose
weather can be bad.

A user keeps a few tasks of four kinds in training. Faults come in an order and at moments that ``--seed`` names: at random,
or at a certain request, such as between an adapter's last file and its manifest, or while a checkpoint is read in the start
that a fault before has caused. Each time, the world has to go on by itself within two minutes.

**Faults**: SIGKILL of a rank, of rank 0, of the operator; SIGSTOP of either rank; a drain (``kubectl delete pod``); two
operators at once; a store that refuses (500, 403), waits, resets connections before or after it has done what it was asked;
SIGKILL while it refuses. In bad weather no task is applied: what the store refuses before a task has trained is its end, by
design. With ``--cluster`` all of this happens on a real node; nothing stands in for Kubernetes (``chaos_parts/node.py``).

**Counted**: ``lost`` adapters that never came or that PEFT does not load; ``duplicates`` that were written, withdrawn or
published again after their publication; ``half_written`` ones that a reader found who checks every manifest against its
files all the time; ``redone`` steps of one task for one fault, the one under way included, where no checkpoint was on its
way to the store, and ``redone_while_writing`` where one was; ``lost_by_drain`` steps that an orderly end has cost;
``forgotten_checkpoints`` that were in the store, but not gone on from; ``same_weights``, against tasks of the same kind
that trained undisturbed. Rows travel in microbatches of their own here, so that neighbours change no bit and the weights
must be the same to the last one. The exit code is 1 when a promise is broken.
"""

from __future__ import annotations

import json
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from bench.chaos_parts import work
from bench.chaos_parts.judge import Redone, duplicates, redone
from bench.chaos_parts.local import LocalWorld
from bench.chaos_parts.player import Played, Player
from bench.chaos_parts.story import NODE_SHARES, SHARES, Fault, tell
from bench.chaos_parts.world import Feeder, Stuck, World
from bench.options import parser
from bench.report import last_line, table

FAULTS, LONG, QUICK = 56, 1000, 6
NODE_FAULTS, NODE_LONG, NODE_QUICK = 14, 100, 3
ACTIVE = 4  # tasks at once
STEPS, EVERY = 150, 25
STALL, NODE_STALL = "5s", "45s"
STILL = "still"


@dataclass(frozen=True)
class Checked:
    """What became of the adapters. ``flaws``: of those that are not as they have to be, by name."""

    flaws: dict[str, str]
    equal: float  # share of those whose bits are those of the undisturbed ones
    relative: float  # greatest relative difference


def main(arguments: list[str]) -> int:
    options = parser("chaos", __doc__)
    options.add_argument("--seed", type=int, default=1, help="names the whole story (default: 1)")
    options.add_argument(
        "--faults",
        type=int,
        help=f"(default: {FAULTS}; {LONG} with --long, {QUICK} with --quick; with --cluster {NODE_FAULTS}, {NODE_LONG}, "
        f"{NODE_QUICK})",
    )
    options.add_argument(
        "--cluster",
        action="store_true",
        help="on the test cluster's node: the chart, real pods, a real kubelet",
    )
    options.add_argument("--keep", action="store_true", help="keep the logs also when all went well")
    chosen = options.parse_args(arguments)
    usual, long, quick = (NODE_FAULTS, NODE_LONG, NODE_QUICK) if chosen.cluster else (FAULTS, LONG, QUICK)
    count = chosen.faults or (quick if chosen.quick else long if chosen.long else usual)
    story = tell(count, chosen.seed, chosen.quick, NODE_SHARES if chosen.cluster else SHARES)
    folder = Path(tempfile.mkdtemp(prefix="mlora-chaos-"))
    steps, every = (80, 20) if chosen.quick else (STEPS, EVERY)
    good = False
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the store and all ranks end, too
    try:
        with world_in(folder, chosen.seed, chosen.cluster) as world:
            result = run(world, story, chosen.seed, steps, every)
        good = not result["broken"]
        line = last_line("chaos", result, repetitions=1, threads=1, quick=chosen.quick)
    except Stuck as error:
        print(f"the world stands still: {error}")
        line = json.dumps({"bench": "chaos", "broken": [str(error).splitlines()[0]]})
    finally:
        if good and not chosen.keep:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            print(f"logs: {folder}/logs")
    print(line)
    return 0 if good else 1


def world_in(folder: Path, seed: int, cluster: bool) -> AbstractContextManager[World]:
    if not cluster:
        return LocalWorld(folder, seed, STALL)
    from bench.chaos_parts.node import NodeWorld  # imports a client for Kubernetes, which takes a second

    return NodeWorld(folder, seed, NODE_STALL)


def run(world: World, story: Sequence[Fault], seed: int, steps: int, every: int) -> dict[str, Any]:
    """Play ``story`` and judge."""
    undisturbed(world, steps, every)
    began = time.monotonic()
    feeder = Feeder(world, ACTIVE, steps, every)
    player = Player(world, feeder, Random(seed))
    world.until(
        lambda: any(raw.get("status", {}).get("step") for raw in world.unfinished().values()),
        "a first task trains",
    )
    try:
        for fault, after in zip(story, [*story[1:], None], strict=True):
            player.play(fault, hasty_next=after is not None and after.hasty)
            print(
                f"{time.monotonic() - began:6.0f} s  {fault.number}. {fault}: {player.played[-1].seconds:.1f} s",
                flush=True,
            )
    finally:
        feeder.stop()
    world.until(lambda: not world.unfinished(), "the last tasks end")
    seconds = time.monotonic() - began
    world.reader.stop()
    checked = check(world)
    cost = redone(player.costs, every)
    again = duplicates(world.weather.deeds)
    print(shown(player, cost))
    broken = [
        *(f"{name}: {flaw}" for name, flaw in checked.flaws.items()),
        *again,
        *world.reader.half_written,
        *world.broken,
    ]
    if cost.usual > every:
        broken.append(f"{cost.usual} steps were redone, more than checkpointEverySteps {every}")
    if cost.orderly:
        broken.append(f"a drain cost {cost.orderly} steps")
    if cost.forgotten:
        broken.append(f"{cost.forgotten} checkpoints in the store were not gone on from")
    if checked.equal < 1:
        broken.append(f"only {checked.equal:.3f} of the adapters have the same bits")
    for one in broken:
        print(f"BROKEN: {one}")
    return {
        "lost": len(checked.flaws),
        "duplicates": len(again),
        "half_written": len(world.reader.half_written),
        "redone": cost.usual,
        "redone_while_writing": cost.writing,
        "lost_by_drain": cost.orderly,
        "forgotten_checkpoints": cost.forgotten,
        "checkpoint_every": every,
        "same_weights": {"equal": checked.equal, "relative": checked.relative},
        **world.facts(),
        "adapters": sum(not name.startswith(STILL) for name in world.tasks.uids),
        "faults": dict(Counter(str(one.fault.kind) for one in player.played)),
        "faults_in_all": len(player.played),
        "interrupted": len(player.costs),
        "group_runs": len(player.runs),
        "requests": world.weather.requests,
        "requests_spoilt": world.weather.spoilt,
        "looks": world.reader.looks,
        "seconds": seconds,
        "seed": seed,
        "broken": broken,
    }


def undisturbed(world: World, steps: int, every: int) -> None:
    """One task of each kind, before any fault."""
    for kind in range(len(work.KINDS)):
        world.apply(kind, f"{STILL}-{kind}", steps, every)
    world.until(lambda: not world.unfinished(), "the undisturbed tasks end", 600)


def check(world: World) -> Checked:
    """Fetch all adapters from the store as anybody would, load them with PEFT, compare them."""
    place = world.folder / "adapters"
    flaws = {
        name: world.tasks.why.get(name, "it never ended")
        for name in world.tasks.uids
        if world.tasks.ends.get(name) != "Succeeded"
    }
    good = [name for name in world.tasks.uids if name not in flaws]
    for name in good:
        if f"chaos/{name}" not in world.reader.whole:
            flaws[name] = "the reader never saw it whole"
            continue
        (place / name).mkdir(parents=True)
        for file in ("adapter_model.safetensors", "adapter_config.json"):
            body = world.store.client.get_object(Bucket="adapters", Key=f"chaos/{name}/{file}")["Body"]
            (place / name / file).write_bytes(body.read())
    good = [name for name in good if name not in flaws]
    asked = {
        "model": str(world.folder / "model"),
        "adapters": {name: str(place / name) for name in good},
        "like": {name: str(place / f"{STILL}-{kind_of(name)}") for name in good},
        "answer": str(world.folder / "answer.json"),
    }
    (world.folder / "asked.json").write_text(json.dumps(asked))
    world.processes.run("check", {"CHAOS_CHECK": str(world.folder / "asked.json")}, "check.log", 600)
    answer = json.loads((world.folder / "answer.json").read_text())
    flaws |= {name: f"PEFT does not load it: {one['flaw']}" for name, one in answer.items() if one["flaw"]}
    compared = [one for name, one in answer.items() if not one["flaw"] and not name.startswith(STILL)]
    return Checked(
        flaws,
        equal=sum(one["equal"] for one in compared) / max(1, len(compared)),
        relative=max((one["relative"] for one in compared), default=0.0),
    )


def kind_of(name: str) -> int:
    return int(name.rpartition("-")[2]) % len(work.KINDS)


def shown(player: Player, cost: Redone) -> str:
    rows: list[list[object]] = []
    for kind in sorted({one.fault.kind for one in player.played}):
        mine: list[Played] = [one for one in player.played if one.fault.kind == kind]
        steps = [one.redone for one in player.costs if one.kind == kind]
        rows.append(
            [
                kind,
                len(mine),
                sum(one.at_moment for one in mine if one.fault.moment is not None),
                statistics.median(one.seconds for one in mine),
                max(one.seconds for one in mine),
                len(steps),
                max(steps, default=0),
            ]
        )
    head = [
        "fault",
        "times",
        "at a request",
        "median s",
        "longest s",
        "tasks interrupted",
        "most steps redone",
    ]
    return f"{table(head, rows)}\nmost steps redone where no checkpoint was on its way: {cost.usual}, else: {cost.writing}"
