"""``python -m bench wire``: what two ranks send each other, over what the method needs.

The need: hidden states forward and their gradients backward across each border, 2 (D - 1) * tokens * hidden * bytes; of
models whose later layers need more than that, with it. The ratio compares the tensors' bytes that the ranks sent with it.
Beside that stands what the kernel counted on the sockets between the two processes, framing and losses included.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.base import cut_folder, smollm2_folder
from bench.options import parser
from bench.ranks import Ranks, task_plans
from bench.report import last_line, table
from bench.sides import LEARNING_RATE, Setting
from mlora_worker.model.facts import model_facts
from mlora_worker.protocol import ModelFacts, TaskPhase

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
STAGES = 2


@dataclass(frozen=True)
class Socket:
    """One end of a TCP connection."""

    local: str  # address:port
    peer: str
    pid: int
    sent: int  # bytes


def main(arguments: list[str]) -> int:
    made = parser("wire", __doc__)
    made.add_argument("--tasks", type=int, default=2)
    made.add_argument("--batch", type=int, default=2, help="rows of each task's step (default: 2)")
    options = made.parse_args(arguments)
    steps = 8 if options.long else 2
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        folder = cut_folder(smollm2_folder(), 2, scratch / "model") if options.quick else smollm2_folder()
        facts = model_facts(folder, STAGES, torch.float32)
        with Ranks(folder, STAGES, scratch / "ranks", options.threads) as ranks:
            before = None
            plans = task_plans(
                Setting(options.tasks, TARGETS), options.batch, steps, LEARNING_RATE, "run", scratch
            )
            ranks.plan([])
            before = socket_bytes(ranks)
            ranks.plan(plans)
            report = ranks.wait_for(
                lambda report: (
                    len(report.tasks) == len(plans)
                    and all(task.phase is TaskPhase.SUCCEEDED for task in report.tasks)
                )
            )
            after = socket_bytes(ranks)
    wire = report.wire
    needed = needed_bytes(facts, STAGES, wire.tokens)
    ratio = wire.payload_bytes / needed
    kernel = after - before if before is not None and after is not None else None
    print(
        table(
            ["bytes between the stages", "", "of the need"],
            [
                ["needed", needed, 1.0],
                ["hidden states and gradients sent", wire.payload_bytes, ratio],
                ["counted by the kernel", kernel, None if kernel is None else kernel / needed],
                [
                    "descriptors and labels, beside them",
                    wire.descriptor_bytes,
                    wire.descriptor_bytes / needed,
                ],
            ],
        )
    )
    print(
        f"{wire.tokens:,} tokens in {wire.microbatches} microbatches, {STAGES} stages, hidden size "
        f"{facts.hidden_size}, float32"
    )
    result = {
        "ratio": ratio,
        "needed_bytes": needed,
        "payload_bytes": wire.payload_bytes,
        "kernel_bytes": kernel,
        "descriptor_bytes": wire.descriptor_bytes,
        "tokens": wire.tokens,
    }
    print(last_line("wire", result, repetitions=1, threads=options.threads, quick=options.quick))
    return 0


def needed_bytes(facts: ModelFacts, stages: int, tokens: int) -> int:
    """Of ``tokens`` tokens across all borders, in both directions."""
    if facts.borders is None:
        return 2 * (stages - 1) * tokens * facts.hidden_size * facts.dtype_bytes
    return sum(one.forward + one.backward for one in facts.borders[1:]) * tokens * facts.dtype_bytes


def socket_bytes(ranks: Ranks) -> int | None:
    """Sent so far between the ranks on torch.distributed's connections; None where ``ss`` is not installed.

    Links and the rendezvous have ports of their own and are left out.
    """
    if shutil.which("ss") is None:
        return None
    listing = subprocess.run(["ss", "-tinpHO"], capture_output=True, text=True, check=True).stdout
    others = (ranks.config.link_port, ranks.config.rendezvous_port)
    return sum(socket.sent for socket in between(parse_sockets(listing), ranks.pids, others))


def parse_sockets(listing: str) -> list[Socket]:
    """Of ``ss -tinpHO``: one line for each connection, of which the first two addresses are this end's and the peer's."""
    sockets = []
    for line in listing.splitlines():
        addresses = re.findall(r"\S+:\d+(?=\s)", line)
        pid, sent = re.search(r"pid=(\d+)", line), re.search(r"bytes_sent:(\d+)", line)
        if len(addresses) >= 2 and pid:
            sockets.append(
                Socket(_plain(addresses[0]), _plain(addresses[1]), int(pid[1]), int(sent[1]) if sent else 0)
            )
    return sockets


def between(
    sockets: Collection[Socket], pids: Collection[int], without_ports: Collection[int]
) -> list[Socket]:
    """Ends of connections from one of ``pids`` to another, but those at ``without_ports``."""
    owner = {socket.local: socket.pid for socket in sockets}
    return [
        socket
        for socket in sockets
        if socket.pid in pids
        and owner.get(socket.peer, socket.pid) in set(pids) - {socket.pid}
        and not {int(end.rpartition(":")[2]) for end in (socket.local, socket.peer)} & set(without_ports)
    ]


def _plain(address: str) -> str:
    """Without what marks an IPv4 address on an IPv6 socket."""
    return address.replace("[::ffff:", "").replace("]", "") if address.startswith("[::ffff:") else address
