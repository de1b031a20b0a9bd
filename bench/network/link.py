"""A link between this machine's network and a namespace of its own, of a rate that can be changed.

A pair of virtual interfaces, each of which sends through a token bucket (``tc tbf``). It needs root. The kernel counts what
is sent, at this end, in both directions.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.ranks import Placement

MTU = 9000  # bytes, as in a cluster's own network
LEAST_BURST, BURST_SECONDS = 32_000, 0.001  # bytes; of the rate
LONGEST_WAIT = "200ms"  # in the bucket's queue, before a packet is lost
NETWORK = "10.99.7"  # .1 is here, .2 is there


@dataclass(frozen=True, slots=True)
class Link:
    namespace: str
    here: str  # interfaces
    there: str

    def shape(self, rate: float | None) -> None:
        """``rate``: bits per second in each direction; None: as fast as it goes."""
        for where, interface in (((), self.here), (self._inside(), self.there)):
            if rate is None:
                _run(*where, "tc", "qdisc", "del", "dev", interface, "root", may_fail=True)
                continue
            burst = max(LEAST_BURST, round(rate / 8 * BURST_SECONDS))
            shaped = ("root", "tbf", "rate", f"{rate:.0f}bit", "burst", str(burst), "latency", LONGEST_WAIT)
            _run(*where, "tc", "qdisc", "replace", "dev", interface, *shaped)

    def sent(self) -> int:
        """Bytes in both directions until now, headers included."""
        counted = Path(f"/sys/class/net/{self.here}/statistics")
        return sum(int((counted / name).read_text()) for name in ("tx_bytes", "rx_bytes"))

    @property
    def placement(self) -> Placement:
        """Rank 0 here, rank 1 there; gloo speaks by the link."""
        return Placement(
            host=f"{NETWORK}.1",
            prefixes=((), self._inside()),
            environments=({"GLOO_SOCKET_IFNAME": self.here}, {"GLOO_SOCKET_IFNAME": self.there}),
        )

    def _inside(self) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.namespace)


def available() -> bool:
    """Whether a link can be made here."""
    return os.geteuid() == 0 and all(shutil.which(name) for name in ("ip", "tc"))


@contextmanager
def link() -> Iterator[Link]:
    """Raises PermissionError where this user may not make one, FileNotFoundError where the programs are missing."""
    if os.geteuid() != 0:
        raise PermissionError("bench network makes a network namespace: run it as root")
    if not available():
        raise FileNotFoundError("bench network needs ip and tc: install iproute2")
    name = f"mlora-bench-{os.getpid()}"
    made = Link(name, f"mlb{os.getpid() % 10_000}a", f"mlb{os.getpid() % 10_000}b")
    _run("ip", "netns", "add", name)
    try:
        _run(
            *("ip", "link", "add", made.here, "mtu", str(MTU), "type", "veth"),
            *("peer", "name", made.there, "mtu", str(MTU), "netns", name),
        )
        _run("ip", "addr", "add", f"{NETWORK}.1/30", "dev", made.here)
        _run("ip", "link", "set", made.here, "up")
        _run("ip", "-n", name, "addr", "add", f"{NETWORK}.2/30", "dev", made.there)
        for interface in ("lo", made.there):
            _run("ip", "-n", name, "link", "set", interface, "up")
        yield made
    finally:
        _run("ip", "netns", "del", name)  # the link goes with it


def _run(*command: str, may_fail: bool = False) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and not may_fail:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
