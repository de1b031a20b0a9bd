"""Where a cluster keeps its files, and the addresses it uses: plain data, nothing is touched here."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class State:
    """The one folder of a cluster's files."""

    root: Path

    @property
    def lock(self) -> Path:
        """Held by whoever changes the cluster."""
        return self.root / "lock"

    @property
    def kubeconfig(self) -> Path:
        """Cluster administrator's access, for kubectl and client libraries."""
        return self.root / "kubeconfig"

    @property
    def storage(self) -> Path:
        """How to reach the object store (see ``s3.Access``)."""
        return self.root / "s3.json"

    @property
    def node(self) -> Path:
        """All that the running node reads and writes; removed with it."""
        return self.root / "node"

    @property
    def configuration(self) -> Path:
        """Certificates, tokens and configuration files of the node's programs."""
        return self.node / "configuration"

    @property
    def logs(self) -> Path:
        """One log file a program."""
        return self.node / "log"

    @property
    def tools(self) -> Path:
        """Links to helm and kubectl, for a person's PATH."""
        return self.root / "bin"

    @property
    def identity(self) -> str:
        """A short name that no other checkout's cluster has."""
        return hashlib.sha256(str(self.root).encode()).hexdigest()[:8]


def this_state() -> State:
    """The state folder of this checkout; ``MLORA_CLUSTER_STATE`` names another."""
    return State(Path(os.environ.get("MLORA_CLUSTER_STATE") or CHECKOUT / "tests/cluster/.state").resolve())


@dataclass(frozen=True)
class Addresses:
    """Addresses of the cluster in a slot; each cluster on a machine has its own slot, 0 first."""

    slot: int

    @property
    def link(self) -> str:
        """Name of the machine's end of the cable to the node."""
        return f"mlora-{self.slot}"

    @property
    def machine_end(self) -> str:
        """Address of the machine on that cable."""
        return f"10.89.{self.slot}.1"

    @property
    def node_end(self) -> str:
        """Address of the node on that cable; the machine's route to pods and Services goes there."""
        return f"10.89.{self.slot}.2"

    @property
    def node(self) -> str:
        """The node's address on the pods' bridge: API server, DNS and S3 listen on it."""
        return f"10.88.{self.slot}.1"

    @property
    def pods(self) -> str:
        """Range of the pods' addresses (and the node's)."""
        return f"10.88.{self.slot}.0/24"

    @property
    def first_pod(self) -> str:
        """First address that a pod gets."""
        return f"10.88.{self.slot}.10"

    @property
    def services(self) -> str:
        """Range of the Services' addresses."""
        return f"10.96.{self.slot}.0/24"

    @property
    def kubernetes_service(self) -> str:
        """Address of the Service `kubernetes`, always the first of the range."""
        return f"10.96.{self.slot}.1"

    @property
    def api_server(self) -> str:
        """URL of the API server."""
        return f"https://{self.node}:6443"

    @property
    def s3_port(self) -> int:
        """Port of the object store on the node; no two clusters share one: it keeps sockets in /tmp by port."""
        return 8333 + 10 * self.slot

    @property
    def s3(self) -> str:
        """URL of the object store, from the machine."""
        return f"http://{self.node}:{self.s3_port}"
