"""What the project's tests and its quick start take for granted about the test cluster."""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import lifecycle
from tests.cluster.cgroups import group_of, hierarchies
from tests.cluster.layout import CHECKOUT, State
from tests.cluster.network import cables
from tests.cluster.nodes import all_nodes, node_process
from tests.fixtures.cluster import Cluster
from tests.fixtures.kubectl import Kubectl
from tests.fixtures.storage import Storage

pytestmark = pytest.mark.integration

RESTRICTED = {
    "runAsNonRoot": True,
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}


def container(image: str, code: str, env: dict[str, str] | None = None) -> dict[str, Any]:
    """A container that runs Python code and that the restricted Pod Security Standard admits."""
    return {
        "name": "main",
        "image": image,
        "command": ["python3", "-c", code],
        "env": [{"name": name, "value": value} for name, value in (env or {}).items()],
        "securityContext": RESTRICTED,
    }


def pod(name: str, **fields: Any) -> dict[str, Any]:
    """A pod that runs once."""
    spec = {"containers": [container(**fields)], "restartPolicy": "Never", "terminationGracePeriodSeconds": 0}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def wait_for_success(kubectl: Kubectl, name: str) -> str:
    """The log of the pod ``name`` once it has succeeded."""
    kubectl("wait", f"pod/{name}", "--for=jsonpath={.status.phase}=Succeeded", "--timeout=120s")
    return kubectl("logs", name)


@pytest.fixture
def inside(kubectl: Kubectl, namespace: str) -> Kubectl:
    """kubectl in this test's namespace."""
    return kubectl.within(namespace)


def test_a_restricted_pod_runs_pytorch_from_the_worker_image(cluster: Cluster, inside: Kubectl) -> None:
    code = "import os, torch, mlora_worker; print(os.getuid(), torch.ones(3).sum().item(), mlora_worker.__file__)"
    inside.create(pod("torch", image=cluster.worker_image, code=code))
    assert wait_for_success(inside, "torch").split() == [
        "65532",
        "3.0",
        "/opt/project/mlora_worker/__init__.py",
    ]


def test_a_pod_that_is_not_restricted_is_refused(cluster: Cluster, inside: Kubectl) -> None:
    loose = pod("loose", image=cluster.worker_image, code="pass")
    del loose["spec"]["containers"][0]["securityContext"]
    with pytest.raises(RuntimeError, match="violates PodSecurity"):
        inside.create(loose)


def test_pods_of_a_headless_service_find_each_other_by_name(cluster: Cluster, inside: Kubectl) -> None:
    wait_for_peer = """
import os, socket, time
own = socket.gethostname()
peer = {"pair-0": "pair-1", "pair-1": "pair-0"}[own]
while True:
    try:
        print(own, "finds", peer, "at", socket.gethostbyname(f"{peer}.pair"), flush=True)
        break
    except OSError:
        time.sleep(0.2)
time.sleep(3600)
"""
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "pair"},
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"app": "pair"}},
    }
    template = {
        "metadata": {"labels": {"app": "pair"}},
        "spec": {
            "containers": [container(cluster.worker_image, wait_for_peer)],
            "terminationGracePeriodSeconds": 0,
        },
    }
    stateful_set = {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": "pair"},
        "spec": {
            "serviceName": "pair",
            "replicas": 2,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": {"app": "pair"}},
            "template": template,
        },
    }
    inside.apply(service, stateful_set)
    inside("rollout", "status", "statefulset/pair", "--timeout=120s")
    addresses = {
        item["metadata"]["name"]: item["status"]["podIP"] for item in inside.json("get", "pods")["items"]
    }
    until(lambda: all("finds" in inside("logs", name) for name in addresses), 60)
    for own, peer in (("pair-0", "pair-1"), ("pair-1", "pair-0")):
        assert inside("logs", own).split() == [own, "finds", peer, "at", addresses[peer]]


def test_a_pod_writes_to_the_object_store_by_its_service_name(
    cluster: Cluster, inside: Kubectl, s3: Storage, namespace: str
) -> None:
    code = """
import os, boto3
client = boto3.client("s3", endpoint_url=os.environ["ENDPOINT"], region_name=os.environ["REGION"])
client.put_object(Bucket="adapters", Key=os.environ["KEY"], Body=b"from a pod")
"""
    key = f"{namespace}/probe"
    env = {
        "ENDPOINT": s3.inside,
        "REGION": s3.region,
        "KEY": key,
        "AWS_ACCESS_KEY_ID": s3.access_key,
        "AWS_SECRET_ACCESS_KEY": s3.secret_key,
    }
    inside.create(pod("writer", image=cluster.worker_image, code=code, env=env))
    wait_for_success(inside, "writer")
    assert s3.client.get_object(Bucket="adapters", Key=key)["Body"].read() == b"from a pod"
    assert s3.keys("adapters", namespace) == [key]


# The rest is about the project's own cluster: a second one, so that no other test is disturbed.


@pytest.fixture
def second(tmp_path: Path) -> Iterator[State]:
    """State folder of a second cluster, which is down again after the test."""
    if os.environ.get("CLUSTER") == "existing":
        pytest.skip("only the user's own cluster may be used")
    state = State(tmp_path / "state")
    yield state
    lifecycle.down(state, print)


def cluster_command(state: State, command: str) -> str:
    """What ``python3 -m tests.cluster COMMAND`` says about the cluster of ``state``."""
    environment = {**os.environ, "MLORA_CLUSTER_STATE": str(state.root)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.cluster", command],
        cwd=CHECKOUT, env=environment, capture_output=True, text=True, check=True, timeout=180,
    )  # fmt: skip
    return done.stdout + done.stderr


def processes_of(state: State) -> dict[int, str]:
    """Every process in the node's process namespace: its id here, and its program's arguments."""
    first = node_process(state)
    if first is None:
        return {}
    namespace = Path(f"/proc/{first}/ns/pid").readlink()
    return all_processes(lambda entry: (entry / "ns/pid").readlink() == namespace)


def all_processes(wanted: Callable[[Path], bool] = lambda _: True) -> dict[int, str]:
    """Id and arguments of the machine's processes whose folder in /proc is ``wanted``."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and wanted(entry):
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # it has ended meanwhile
            continue
    return found


def test_up_heals_what_was_killed_and_down_leaves_nothing(second: State, kubectl: Kubectl) -> None:
    before = traces(second)
    assert "cluster: up" in cluster_command(second, "up")
    assert "is up" in cluster_command(second, "up"), "a second time does nothing"

    # Any program: the node starts it again. Drawn anew in each run, and shown when the test fails.
    programs = {
        pid: words for pid, words in processes_of(second).items() if "tests.cluster.node" not in words
    }
    assert len(programs) >= 9
    victims = random.sample(sorted(programs), 4)
    print("killed:", [programs[pid].split()[:2] for pid in victims])
    for victim in victims:
        os.kill(victim, signal.SIGKILL)
    assert "cluster: is up" in cluster_command(second, "up")
    assert not set(victims) & set(processes_of(second))

    # The node itself, and with it everything: a new one is made.
    first = node_process(second)
    assert first is not None
    os.kill(first, signal.SIGKILL)
    until(lambda: node_process(second) is None, 30)
    assert "cluster: up" in cluster_command(second, "up")

    everything = processes_of(second)
    cluster_command(second, "down")
    # With its command line, since process ids are used again. The kernel has killed them all; a large one needs a moment.
    until(lambda: everything.items() & all_processes().items() == set(), 10)
    assert traces(second) == before
    assert sorted(path.name for path in second.root.iterdir()) == ["lock"]
    kubectl("get", "--raw", "/readyz")  # the first cluster has not noticed


def test_a_start_that_was_killed_halfway_is_cleaned_up(second: State) -> None:
    before = traces(second)
    environment = {**os.environ, "MLORA_CLUSTER_STATE": str(second.root)}
    starting = subprocess.Popen(
        [sys.executable, "-m", "tests.cluster", "up"],
        cwd=CHECKOUT,
        env=environment,
        stderr=subprocess.DEVNULL,
    )
    until(lambda: node_process(second) is not None, 60)
    starting.kill()
    starting.wait()
    cluster_command(second, "down")
    assert traces(second) == before


def traces(state: State) -> dict[str, object]:
    """All that a cluster could leave on this machine outside its state folder."""
    filters = subprocess.run(["iptables-save"], capture_output=True, text=True, check=True).stdout
    return {
        "processes": [process for root, process in all_nodes() if root == state.root],
        "links": [link for link, owner in cables().items() if owner == state.root],
        "mounts": [line for line in Path("/proc/mounts").read_text().splitlines() if str(state.root) in line],
        "control groups": [path for path in hierarchies() if (path / group_of(state.identity)).exists()],
        "routes": Path("/proc/net/route").read_text().count("mlora-1"),
        "packet filter": [line for line in filters.splitlines() if line.startswith(("-A", ":KUBE", ":CNI"))],
        "sockets": sorted(Path("/tmp").glob("seaweedfs-*-834*.sock")),
        "containerd": list(Path("/run/containerd").glob("**/*")),
        "network namespaces": list(Path("/run/netns").glob("*")),
        "kubelet": list(Path("/var/lib/kubelet").glob("*")),
    }


def until(condition: Callable[[], bool], seconds: float) -> None:
    """Wait for ``condition``; a failure when it does not come true."""
    assert lifecycle.wait(condition, seconds), f"not within {seconds} s"
