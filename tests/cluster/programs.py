"""The programs of a node and their command lines, as pure functions."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.credentials import NODE, Credentials
from tests.cluster.layout import Addresses, State
from tests.cluster.s3 import weed_command

ETCD = "http://127.0.0.1:2379"


@dataclass(frozen=True)
class Program:
    """One program of the node."""

    name: str
    command: list[str]
    needs_api_server: bool
    """Start it only once the API server answers: before that it would give up, or wait longer than needed."""


def programs(
    state: State, addresses: Addresses, credentials: Credentials, testcluster: Path, weed: Path
) -> list[Program]:
    """All programs of the node, in the order in which to start them."""

    def part(name: str, *arguments: str, needs_api_server: bool = True) -> Program:
        return Program(name, [str(testcluster), name, *arguments], needs_api_server)

    configuration: Callable[[str], str] = lambda name: str(state.configuration / name)  # noqa: E731
    return [
        part(
            "etcd",
            f"--data-dir={state.node}/etcd",
            f"--listen-client-urls={ETCD}",
            f"--advertise-client-urls={ETCD}",
            "--listen-peer-urls=http://127.0.0.1:2380",
            # The data does not outlive the node, so waiting for the disk protects nothing.
            "--unsafe-no-fsync",
            needs_api_server=False,
        ),
        part(
            "kube-apiserver",
            f"--etcd-servers={ETCD}",
            f"--bind-address={addresses.node}",
            f"--advertise-address={addresses.node}",
            "--secure-port=6443",
            f"--cert-dir={state.node}/apiserver",
            f"--tls-cert-file={credentials.certificate('apiserver')}",
            f"--tls-private-key-file={credentials.key('apiserver')}",
            f"--token-auth-file={credentials.tokens}",
            f"--service-cluster-ip-range={addresses.services}",
            "--allow-privileged=true",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={credentials.folder}/service-accounts.pub",
            f"--service-account-signing-key-file={credentials.key('service-accounts')}",
            "--kubelet-preferred-address-types=InternalIP",
            f"--kubelet-client-certificate={credentials.certificate('kubelet-client')}",
            f"--kubelet-client-key={credentials.key('kubelet-client')}",
            needs_api_server=False,
        ),
        Program("containerd", ["containerd", "--config", configuration("containerd.toml")], False),
        Program("s3", weed_command(weed, state.node / "s3", addresses.node, addresses.s3_port), False),
        part(
            "kube-controller-manager",
            f"--kubeconfig={credentials.admin}",
            "--leader-elect=false",
            "--bind-address=127.0.0.1",
            "--use-service-account-credentials=true",
            f"--service-account-private-key-file={credentials.key('service-accounts')}",
            f"--root-ca-file={credentials.authority}",
        ),
        part("kube-scheduler", f"--config={configuration('scheduler.yaml')}", "--bind-address=127.0.0.1"),
        part(
            "kubelet",
            f"--config={configuration('kubelet.yaml')}",
            f"--kubeconfig={credentials.kubelet}",
            f"--hostname-override={NODE}",
            f"--node-ip={addresses.node}",
        ),
        part("kube-proxy", f"--config={configuration('proxy.yaml')}"),
        part("coredns", "-conf", configuration("Corefile")),
    ]
