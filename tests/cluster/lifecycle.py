"""A cluster's life: up when it is not, down without a trace, whatever state a former run left it in."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.cluster import api, cgroups, configuration, credentials, gobinaries, images, network, s3
from tests.cluster.cache import locked, remove
from tests.cluster.command import run
from tests.cluster.debian import install_missing
from tests.cluster.environment import program_of_environment, site_packages
from tests.cluster.layout import CHECKOUT, Addresses, State
from tests.cluster.node import KUBELET_FOLDER
from tests.cluster.nodes import all_nodes, containerd_socket, node_process, node_processes
from tests.cluster.pause import pause_archive

Say = Callable[[str], None]
PATIENCE = 60.0
SHAPING = ("api", "configuration", "credentials", "layout", "network", "node", "programs", "s3")
"""The modules that decide what a running cluster is like; a change of another one does not call for a new one."""
MACHINE = Path("/run/lock/mlora-test-cluster")
"""Lock that all clusters of this machine share."""


def up(state: State, say: Say) -> None:
    """Make the cluster of ``state`` run; nothing happens when it does and was made from the present files.

    Raises ``TimeoutError`` when it does not come up; its logs are then in ``state.logs``.
    """
    require_root()
    with locked(state.lock):
        end_abandoned(say)
        if node_process(state) is not None and made_from(state) == recipe():
            # Programs that were killed are started again by the node, so give it a moment.
            if wait(lambda: healthy(state), PATIENCE):
                say("cluster: is up")
                return
            say("cluster: does not answer, making a new one")
        take_down(state, say)
        bring_up(state, say)


def down(state: State, say: Say) -> None:
    """End the cluster of ``state`` and remove all it has left; fine when there is none."""
    require_root()
    with locked(state.lock):
        end_abandoned(say)
        take_down(state, say)


def bring_up(state: State, say: Say) -> None:
    """Start a cluster where none is."""
    install_missing()
    testcluster, pause, weed = gobinaries.testcluster(), pause_archive(), program_of_environment("weed")
    began = time.monotonic()
    state.configuration.mkdir(parents=True)
    with locked(MACHINE):
        addresses = network.claim_slot(state.root)
    say(f"cluster: starting on {addresses.node}")
    group = cgroups.group_of(state.identity)
    keys = credentials.create(state, addresses)
    for name, text in configuration.files(state, addresses, keys, group).items():
        path = state.configuration / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    template = configuration.container_template(json.loads(run("ctr", "oci", "spec")), site_packages())
    (state.configuration / "container.json").write_text(json.dumps(template))
    s3.prepare(state.node / "s3", addresses.s3, s3.INSIDE).write(state.storage)

    start_node(state, addresses, testcluster, weed)
    # Only now: a group whose cluster has no node counts as left behind. Kubelet starts seconds later.
    cgroups.create(group)
    if not wait(lambda: healthy(state), PATIENCE):
        raise TimeoutError(f"the cluster is not ready after {PATIENCE:.0f} s; its logs are in {state.logs}")
    api.serve_storage(api.ApiServer(state.kubeconfig), addresses.node, addresses.s3_port)
    s3.create_buckets(weed, addresses.node, addresses.s3_port)
    images.import_archive(containerd_socket(state), pause)
    link_tools(state)
    (state.node / "made-from").write_text(recipe())
    say(f"cluster: up after {time.monotonic() - began:.0f} s")


def start_node(state: State, addresses: Addresses, testcluster: Path, weed: Path) -> None:
    """Start the node's first process in namespaces of its own and plug in its cable."""
    words = [str(state.root), str(addresses.slot), str(testcluster), str(weed)]
    with (state.node / "node.log").open("w") as log:
        subprocess.Popen(
            ["unshare", "--pid", "--mount", "--net", "--fork", "--kill-child", "--mount-proc",
             sys.executable, "-m", "tests.cluster.node", *words],
            cwd=CHECKOUT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    if not wait(lambda: node_process(state) is not None, 10.0):
        raise TimeoutError(f"the node did not start; see {state.node / 'node.log'}")
    process = node_process(state)
    assert process is not None
    network.connect(addresses, process)


def take_down(state: State, say: Say) -> None:
    """End the node's processes, then remove what is not bound to them."""
    if node_process(state) is not None:
        say("cluster: ending it")
    for process in node_processes(state.root):
        # Killing the first process of a process namespace makes the kernel kill all others in it.
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:
            continue
    if not wait(lambda: not node_processes(state.root), 30.0):
        raise TimeoutError(f"processes {node_processes(state.root)} of the cluster do not end")
    for link, owner in network.cables().items():
        if owner == state.root:
            network.disconnect(link)
            s3.remove_sockets(Addresses(int(link.removeprefix("mlora-"))).s3_port)
    cgroups.remove(cgroups.group_of(state.identity))
    # Removing it would also remove what another node has mounted there, although that is not seen from here.
    if not all_nodes() and KUBELET_FOLDER.is_dir() and not any(KUBELET_FOLDER.iterdir()):
        KUBELET_FOLDER.rmdir()
    for path in (state.node, state.kubeconfig, state.storage, state.tools):
        remove(path)


def end_abandoned(say: Say) -> None:
    """End clusters whose state folder is gone, with the checkout that it was in, and remove unowned leftovers."""
    with locked(MACHINE):
        for link, owner in network.cables().items():
            if owner is None:  # its maker was killed before it could sign it
                network.disconnect(link)
        owners = {owner for owner in network.cables().values() if owner is not None}
        for root in owners | {root for root, _ in all_nodes()}:
            if not root.exists():
                say(f"cluster: ending the one of {root}, which is no longer there")
                take_down(State(root), say)
        alive = {cgroups.group_of(State(root).identity) for root, _ in all_nodes()}
        for group in cgroups.existing() - alive:
            cgroups.remove(group)


def healthy(state: State) -> bool:
    """Whether API server, node and object store all answer."""
    if node_process(state) is None or not state.kubeconfig.exists():
        return False
    server = api.ApiServer(state.kubeconfig)
    ready = server.ready() and api.node_ready(server, credentials.NODE)
    return ready and s3.answers(s3.read_access(state.storage).endpoint)


def recipe() -> str:
    """What a running cluster was made from: its programs, and the code that arranges them."""
    here = Path(__file__).parent
    parts = [gobinaries.testcluster(), program_of_environment("weed"), site_packages()]
    code = "".join((here / f"{module}.py").read_text() for module in SHAPING)
    return "\n".join([*map(str, parts), code])


def made_from(state: State) -> str:
    """The recipe of the running cluster; empty when it was never finished."""
    path = state.node / "made-from"
    return path.read_text() if path.exists() else ""


def link_tools(state: State) -> None:
    """Put links to helm and kubectl where ``make cluster-env`` points a person's PATH to."""
    state.tools.mkdir()
    kubectl = shutil.which("kubectl")
    (state.tools / "helm").symlink_to(gobinaries.helm())
    (state.tools / "kubectl").symlink_to(kubectl or program_of_environment("kubectl"))


def wait(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether ``condition`` came true within ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def require_root() -> None:
    """Raises ``PermissionError`` with what to do instead, unless run by root."""
    if os.geteuid() != 0:
        raise PermissionError(
            "the test cluster needs root; as another user set CLUSTER=existing to use your own"
        )
