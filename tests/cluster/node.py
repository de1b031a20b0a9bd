"""The node: the first process in namespaces of its own; it starts the cluster's programs and keeps them running.

``lifecycle.py`` starts it as ``python3 -m tests.cluster.node STATE SLOT TESTCLUSTER WEED`` under ``unshare``.
A program that ends, for whatever reason, is started again after a second, as an init system would.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.cluster import network
from tests.cluster.api import ApiServer
from tests.cluster.command import run
from tests.cluster.credentials import Credentials
from tests.cluster.layout import Addresses, State
from tests.cluster.programs import Program, programs

KUBELET_FOLDER = Path("/var/lib/kubelet")
RESTART_DELAY = 1.0


def main(arguments: list[str]) -> None:
    """Set up the node and look after its programs until killed."""
    root, slot, testcluster, weed = arguments
    state, addresses = State(Path(root)), Addresses(int(slot))
    os.environ["PATH"] = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    # Go's programs collect garbage at five times their live memory instead of twice: there is enough of it here. It was
    # a third of what the API server took of the processor while 2,000 tasks were applied.
    os.environ["GOGC"] = "400"
    arrange_mounts(state)
    network.configure_node(addresses)
    credentials = Credentials(state.configuration / "pki")
    supervise(programs(state, addresses, credentials, Path(testcluster), Path(weed)), state)


def arrange_mounts(state: State) -> None:
    """Give the node its own view of the folders that its programs insist on; the machine sees none of it."""
    # Mounts made here must reach the containers, as kubelet promises them.
    run("mount", "--make-rshared", "/")
    # containerd's and its shims' sockets, and the pods' network namespaces.
    run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run")
    # kubelet links the pods' logs in /var/log/containers; the logs themselves are in the state folder.
    run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/var/log")
    # kubelet keeps its sockets for device plugins there, whatever its own folder is.
    KUBELET_FOLDER.mkdir(parents=True, exist_ok=True)
    (state.node / "kubelet").mkdir(exist_ok=True)
    run("mount", "--bind", state.node / "kubelet", KUBELET_FOLDER)


def supervise(wanted: list[Program], state: State) -> None:
    """Start the programs, each when what it needs is there, and start again what ends. Never returns."""
    state.logs.mkdir(exist_ok=True)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    server = ApiServer(state.kubeconfig)
    running: dict[int, Program] = {}
    not_before = {program.name: 0.0 for program in wanted}
    while True:
        waiting = [program for program in wanted if program not in running.values()]
        due = [program for program in waiting if time.monotonic() >= not_before[program.name]]
        api_server_ready = any(program.needs_api_server for program in due) and server.ready()
        for program in due:
            if api_server_ready or not program.needs_api_server:
                running[start(program, state)] = program
        # Asleep until a child ends; while something waits to be started, look again soon.
        signal.sigtimedwait({signal.SIGCHLD}, 0.1 if len(running) < len(wanted) else 3600)
        for child in ended_children():
            # Children that are not ours are the containers' orphans, which only need burying.
            if child in running:
                not_before[running.pop(child).name] = time.monotonic() + RESTART_DELAY


def start(program: Program, state: State) -> int:
    """Start ``program`` with its output appended to its log; the process id."""
    with (state.logs / f"{program.name}.log").open("a") as log:
        return subprocess.Popen(
            program.command,
            cwd=state.node,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # The block above is inherited, and a program that misses its children's ends hangs.
            preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD}),
        ).pid


def ended_children() -> list[int]:
    """Bury all children that have ended; their process ids."""
    ended: list[int] = []
    while True:
        try:
            child, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if child == 0:
            return ended
        ended.append(child)


if __name__ == "__main__":
    main(sys.argv[1:])
