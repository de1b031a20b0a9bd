"""Finding nodes among the machine's processes.

A node is known by its exact command line, not by a file with a process id: such a file can be missing, or name
a process that has got the same id since.
"""

from pathlib import Path

from tests.cluster.configuration import CONTAINERD_SOCKET
from tests.cluster.layout import State


def node_process(state: State) -> int | None:
    """Process id of the node of ``state``, as this machine sees it."""
    first = [process for root, process in all_nodes() if root == state.root and not is_unshare(process)]
    return first[0] if first else None


def node_processes(root: Path) -> list[int]:
    """The node's first process and the ``unshare`` that started it."""
    return [process for owner, process in all_nodes() if owner == root]


def all_nodes() -> list[tuple[Path, int]]:
    """State folder and process id of every node on this machine, known by its exact command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:  # it has ended meanwhile
            continue
        if "tests.cluster.node" in words:
            root = words.index("tests.cluster.node") + 1
            if words[root - 2] == "-m" and len(words) > root + 3:
                found.append((Path(words[root]), int(entry.name)))
    return found


def is_unshare(process: int) -> bool:
    """Whether ``process`` is the one outside the namespaces that waits for the node."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")[0].endswith(b"unshare")
    except OSError:
        return True


def containerd_socket(state: State) -> Path:
    """The node's containerd, reached from the machine through the node's own view of the files."""
    process = node_process(state)
    if process is None:
        raise RuntimeError("the cluster is not up")
    return Path(f"/proc/{process}/root{CONTAINERD_SOCKET}")
