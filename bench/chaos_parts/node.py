"""The world on a real node: the chart, real pods, their kubelet and API server; only the weather is made.

The store is a SeaweedFS of this benchmark's own on the loopback address, which pods reach through the weather alone.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

from kubernetes import config
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from bench.chaos_parts import work
from bench.chaos_parts.built import Built
from bench.chaos_parts.containers import send
from bench.chaos_parts.coordinator import ask
from bench.chaos_parts.pods import Pods, Running
from bench.chaos_parts.processes import Processes
from bench.chaos_parts.reader import Reader
from bench.chaos_parts.story import Fault
from bench.chaos_parts.watched import WatchedTasks
from bench.chaos_parts.weather import Weather
from bench.chaos_parts.world import REMEMBERED, Tasks, wait_until
from mlora_operator.api import API_VERSION
from mlora_operator.api.pipeline import KIND
from mlora_operator.manifests.owner import Owner
from tests.cluster import s3 as seaweedfs
from tests.cluster.command import CommandFailed
from tests.cluster.credentials import NODE
from tests.cluster.environment import program_of_environment
from tests.cluster.layout import Addresses, State
from tests.cluster.network import cables
from tests.fixtures.cluster import own_cluster
from tests.fixtures.kubectl import Kubectl, kubectl_program
from tests.fixtures.release import installed, restricted, secret
from tests.fixtures.storage import Storage, connect

NAMESPACE, RELEASE = "mlora-chaos", "chaos"
PIPELINE = Owner(NAMESPACE, "tiny", "")
PATIENCE = 420.0  # seconds: the kubelet's longest pause between two starts, and a start
REPORT_WITHIN = 2.0  # seconds
RESOURCES = {"requests": {"cpu": "500m", "memory": "512Mi"}, "limits": {"memory": "3Gi"}}


class NodeWorld(Built):
    """A ``World``, and a context manager. Nobody else may use the cluster meanwhile: its node is cordoned at times."""

    def __init__(self, folder: Path, seed: int, stall: str) -> None:
        super().__init__()
        self.folder, self._seed, self._stall = folder, seed, stall
        self.stages, self.moment_within = work.STAGES, 60.0
        self.tasks = Tasks()
        self._frozen: Running | None = None

    def _build(self) -> None:
        access = self._stack.enter_context(
            seaweedfs.serve(program_of_environment("weed"), self.folder / "store")
        )
        self.processes = self._stack.enter_context(Processes(self.folder / "logs"))
        cluster, state = own_cluster()
        self.store: Storage = connect(access)
        self.weather = Weather(access.endpoint, Random(self._seed), REMEMBERED, machine_end(state))
        self._stack.callback(self.weather.close)
        self._kubectl = Kubectl(kubectl_program(), cluster.kubeconfig)
        self._kubectl.apply(restricted(NAMESPACE))
        self._stack.callback(self._kubectl, "delete", "namespace", NAMESPACE, "--wait=true", "--timeout=180s")
        self.system = self._stack.enter_context(
            installed(cluster, self._kubectl, RELEASE, NAMESPACE, values())
        )
        self.system.apply(secret(work.SECRET, access.access_key, access.secret_key))
        self._pods = Pods(config.new_client_from_config(str(cluster.kubeconfig)), PIPELINE)
        self._watched = WatchedTasks(config.new_client_from_config(str(cluster.kubeconfig)), NAMESPACE)
        self._stack.callback(self._watched.close)
        self.processes.wait_ready()
        work.fill(self.store, self.processes, self.folder / "model")
        self.reader = Reader(connect(access).client, "adapters")
        self._stack.callback(self.reader.close)
        self.system.apply(pipeline(self.weather.endpoint, self._stall))
        self._stack.callback(self._delete_all)

    def _delete_all(self) -> None:
        if self._frozen is not None:
            send(self._frozen.pid, signal.SIGCONT)
        self._kubectl("uncordon", NODE)
        self.system("delete", "loratasks,lorapipelines", "--all", "--wait=false")

    # --- tasks --------------------------------------------------------------------------------------------------

    def apply(self, kind: int, name: str, steps: int, every: int) -> None:
        spec = work.task_spec(kind, name, steps, every, self.weather.endpoint)
        self.tasks.uids[name] = self._watched.create(name, spec)

    def unfinished(self) -> dict[str, dict[str, Any]]:
        return self.tasks.unfinished(self._watched.mirror.all(), self._watched.delete)

    # --- faults -------------------------------------------------------------------------------------------------

    def strike(self, fault: Fault, rank: int, look: Callable[[], None]) -> None:
        match fault.kind:
            case "kill_rank" | "kill_coordinator":
                self._kill(rank, look)
            case "kill_while_s3_is_away":
                time.sleep(fault.seconds / 2)
                self._kill(rank, look)
            case "freeze_rank":
                self._frozen = self._wait_for(lambda: self._pods.rank(rank), f"rank {rank} runs")
                look()
                send(self._frozen.pid, signal.SIGSTOP)
            case "drain_rank" | "drain_coordinator":
                self._kubectl("cordon", NODE)
                look()
                self._evict(self._pods.name(rank))
            case "delete_rank" | "delete_coordinator":
                pod = self._wait_for(lambda: self._pods.rank(rank), f"rank {rank} runs")
                look()
                self.system("delete", "pod", pod.name, "--grace-period=0", "--force")
            case "kill_operator":
                send(self._acting().pid, signal.SIGKILL)
            case "restart_operator":
                self.system("rollout", "restart", "deployment")
            case "two_operators":
                self._two_operators(fault.seconds)

    def mend(self, fault: Fault) -> None:
        match fault.kind:
            case "freeze_rank":
                self._wake()
            case "drain_rank" | "drain_coordinator":
                time.sleep(fault.seconds)
                self._kubectl("uncordon", NODE)
            case "kill_operator" | "two_operators":
                self._operator_acts()
            case "restart_operator":
                self.system("rollout", "status", "deployment", "--timeout=180s")
                self._operator_acts()

    def _kill(self, rank: int, look: Callable[[], None]) -> None:
        """One that is between two starts is waited for."""
        running = self._wait_for(lambda: self._pods.rank(rank), f"rank {rank} runs")
        look()
        send(running.pid, signal.SIGKILL)

    def _wake(self) -> None:
        """A rank that was frozen, once the operator has given it up: it shall do no harm."""
        frozen = self._frozen
        assert frozen is not None
        self.until(lambda: not self._pods.is_wanted(frozen.uid), "the frozen rank is given up")
        send(frozen.pid, signal.SIGCONT)
        self._frozen = None

    def _evict(self, pod: str) -> None:
        """As ``kubectl drain`` asks for it."""
        meta = {"name": pod, "namespace": NAMESPACE}
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": meta}
        path = f"/api/v1/namespaces/{NAMESPACE}/pods/{pod}/eviction"
        self.system("create", "--raw", path, "--filename", "-", stdin=json.dumps(eviction))

    def _two_operators(self, seconds: float) -> None:
        """The one that acts stands still, another one takes over, and then the former wakes and believes that it acts."""
        self.system("scale", "deployment", "--all", "--replicas=2")
        self.system("rollout", "status", "deployment", "--timeout=180s")
        former = self._acting()
        send(former.pid, signal.SIGSTOP)
        try:
            self.until(
                lambda: self._pods.lease().holder_identity not in (None, "", former.name),
                "another operator takes over",
            )
        finally:
            send(former.pid, signal.SIGCONT)
        time.sleep(seconds)
        self.system("scale", "deployment", "--all", "--replicas=1")

    def _acting(self) -> Running:
        return self._wait_for(self._pods.operator, "an operator acts")

    def _operator_acts(self) -> None:
        """One that runs has said so after now."""
        before = self._pods.renewed()
        self.until(
            lambda: self._pods.renewed() > before and self._pods.operator() is not None,
            "an operator acts again",
        )

    def _wait_for(self, find: Callable[[], Running | None], what: str) -> Running:
        found: list[Running] = []

        def there() -> bool:
            one = find()
            found.extend([one] if one is not None else [])
            return bool(found)

        self.until(there, what)
        return found[0]

    # --- what is known ------------------------------------------------------------------------------------------

    def report(self) -> Mapping[str, Any] | None:
        try:
            found = self._pods.coordinator()
        except (ApiException, HTTPError):  # the API server has much to do
            return None
        if found is None:
            return None
        url, token, certificate = found
        return ask(url, token, REPORT_WITHIN, certificate)

    def until(self, done: Callable[[], bool], what: str, seconds: float | None = None) -> None:
        wait_until(done, what, PATIENCE if seconds is None else seconds, 0.25, self.state)

    @property
    def broken(self) -> Sequence[str]:
        return self._watched.mirror.broken

    def facts(self) -> Mapping[str, Any]:
        return {"cluster": True}

    def state(self) -> str:
        """For whoever has to find out why."""
        lines = [f"report {str(self.report())[-1500:]}"]
        for arguments in (
            ("get", "loratasks,lorapipelines,pods", "--output", "wide"),
            ("describe", "lorapipelines"),
            ("logs", "--selector=app.kubernetes.io/name=mlora-operator", "--tail=40", "--prefix"),
            ("logs", "--selector=app.kubernetes.io/name=mlora-worker", "--tail=40", "--prefix"),
        ):
            with suppress(CommandFailed):
                lines.append(self.system(*arguments))
        return "\n".join(lines)


def machine_end(state: State) -> str:
    """The machine's address as pods of this cluster reach it."""
    [link] = [name for name, owner in cables().items() if owner == state.root]
    return Addresses(int(link.removeprefix("mlora-"))).machine_end


def values() -> dict[str, Any]:
    """The chart's, besides the images."""
    return {"watchNamespaces": [NAMESPACE], "log": {"format": "text"}}


def pipeline(endpoint: str, stall: str) -> dict[str, Any]:
    spec = work.pipeline_spec(endpoint, stall) | {"worker": {"threads": 1, "resources": RESOURCES}}
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": PIPELINE.name}, "spec": spec}
