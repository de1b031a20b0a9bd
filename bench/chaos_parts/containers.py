"""Processes of a pod's containers, as the machine sees them that the test cluster's node runs on.

A signal from here reaches the first process of a container, which ignores signals from within. This is what a failing node
does; ``kubectl`` has no such verb.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

PROC = Path("/proc")


def first_process(pod_uid: str, program: str, proc: Path = PROC) -> int | None:
    """Process id of the first process in the container of that pod which runs ``program`` (a word of its command line)."""
    for entry in proc.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if _is_in(entry, pod_uid) and _is_first(entry) and _runs(entry, program):
                return int(entry.name)
        except OSError:  # it has ended meanwhile
            continue
    return None


def send(pid: int, number: signal.Signals) -> bool:
    """Whether the process was still there."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _is_in(entry: Path, pod_uid: str) -> bool:
    """The kubelet names a pod's control group after its uid, with hyphens or (as systemd wants it) underscores."""
    groups = (entry / "cgroup").read_text()
    return f"pod{pod_uid}" in groups or f"pod{pod_uid.replace('-', '_')}" in groups


def _is_first(entry: Path) -> bool:
    """Number 1 in the innermost of its process namespaces."""
    for line in (entry / "status").read_text().splitlines():
        if line.startswith("NSpid:"):
            return line.split()[-1] == "1"
    return False


def _runs(entry: Path, program: str) -> bool:
    return program.encode() in (entry / "cmdline").read_bytes().split(b"\0")
