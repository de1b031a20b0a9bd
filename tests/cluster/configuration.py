"""Configuration files of the node's programs, as pure functions of the state folder and the addresses."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.cluster.credentials import NODE, Credentials
from tests.cluster.layout import Addresses, State

PAUSE_IMAGE = "localhost/mlora-pause:1"
PYTHON_ENVIRONMENT = "/opt/env"
CONTAINERD_SOCKET = "/run/containerd/containerd.sock"
DNS_DOMAIN = "cluster.local"


def files(state: State, addresses: Addresses, credentials: Credentials, cgroup: str) -> dict[str, str]:
    """Every configuration file: its path below ``state.configuration``, and its text (JSON is YAML too)."""
    return {
        "containerd.toml": containerd(state),
        "net.d/10-pods.conflist": json.dumps(pod_network(state, addresses), indent=2),
        "kubelet.yaml": json.dumps(kubelet(state, addresses, credentials, cgroup), indent=2),
        "proxy.yaml": json.dumps(proxy(addresses, credentials), indent=2),
        "scheduler.yaml": json.dumps(scheduler(credentials), indent=2),
        "Corefile": corefile(addresses, credentials),
    }


def containerd(state: State) -> str:
    """containerd with the project's pause image and container template; its sockets are in the node's own /run."""
    return f"""\
version = 2
root = "{state.node}/containerd"
state = "/run/containerd"

[grpc]
address = "{CONTAINERD_SOCKET}"

[plugins."io.containerd.grpc.v1.cri"]
# Lowering a score needs a capability that root in a sandboxed machine lacks.
restrict_oom_score_adj = true
sandbox_image = "{PAUSE_IMAGE}"

[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "/usr/lib/cni"
conf_dir = "{state.configuration}/net.d"

[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = "overlayfs"
default_runtime_name = "runc"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
base_runtime_spec = "{state.configuration}/container.json"
"""


def container_template(defaults: Mapping[str, Any], environment: Path) -> dict[str, Any]:
    """containerd's default OCI template, with the machine's Python packages read-only in every container.

    An image with PyTorch takes minutes to build and import; this takes nothing, and pods start at once.
    """
    mount = {
        "destination": PYTHON_ENVIRONMENT,
        "type": "bind",
        "source": str(environment),
        "options": ["rbind", "ro", "nosuid", "nodev"],
    }
    return {**defaults, "mounts": [*defaults["mounts"], mount]}


def pod_network(state: State, addresses: Addresses) -> dict[str, Any]:
    """Pods on one bridge, with addresses that the machine reaches too; no way out to other networks."""
    pods = {"subnet": addresses.pods, "rangeStart": addresses.first_pod, "gateway": addresses.node}
    return {
        "cniVersion": "1.0.0",
        "name": "pods",
        "plugins": [
            {
                "type": "bridge",
                "bridge": "cni0",
                "isGateway": True,
                "ipMasq": False,
                # A pod reaches itself through its Service.
                "hairpinMode": True,
                "ipam": {
                    "type": "host-local",
                    "ranges": [[pods]],
                    "routes": [{"dst": "0.0.0.0/0"}],
                    "dataDir": f"{state.node}/pod-addresses",
                },
            }
        ],
    }


def kubelet(state: State, addresses: Addresses, credentials: Credentials, cgroup: str) -> dict[str, Any]:
    """A kubelet that keeps its pods in a control group of this cluster alone."""
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": addresses.node,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": False},
            "x509": {"clientCAFile": str(credentials.authority)},
        },
        "authorization": {"mode": "AlwaysAllow"},
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{cgroup}",
        "failSwapOn": False,
        "clusterDNS": [addresses.node],
        "clusterDomain": DNS_DOMAIN,
        "resolvConf": "/dev/null",
        "podLogsDir": f"{state.node}/pod-logs",
        "containerRuntimeEndpoint": f"unix://{CONTAINERD_SOCKET}",
        "evictionHard": {"nodefs.available": "1%", "imagefs.available": "1%", "memory.available": "100Mi"},
        # There is no registry to pull a collected image from again.
        "imageGCHighThresholdPercent": 100,
        # So that tests which change the node's capacity need not wait for long.
        "nodeStatusUpdateFrequency": "2s",
        # So that tests which change a Secret need not wait for long until its pods have the new one.
        "syncFrequency": "10s",
    }


def proxy(addresses: Addresses, credentials: Credentials) -> dict[str, Any]:
    """Service addresses by packet filter rules, in the node's own network namespace."""
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "bindAddress": "127.0.0.1",
        "healthzBindAddress": "127.0.0.1:10256",
        "metricsBindAddress": "127.0.0.1:10249",
        "mode": "iptables",
        "clusterCIDR": addresses.pods,
        "hostnameOverride": NODE,
        "clientConnection": {"kubeconfig": str(credentials.admin)},
        # The table's size belongs to the whole machine: leave it.
        "conntrack": {"maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
        "iptables": {"minSyncPeriod": "100ms"},
    }


def scheduler(credentials: Credentials) -> dict[str, Any]:
    """The default scheduler, alone."""
    return {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "clientConnection": {"kubeconfig": str(credentials.admin)},
        "leaderElection": {"leaderElect": False},
    }


def corefile(addresses: Addresses, credentials: Credentials) -> str:
    """Cluster DNS; answers are kept for a second, so that a new pod's name resolves at once."""
    return f"""\
.:53 {{
  bind {addresses.node}
  errors
  health 127.0.0.1:8191
  kubernetes {DNS_DOMAIN} in-addr.arpa {{
    kubeconfig {credentials.admin} mlora-test
    pods insecure
    ttl 1
  }}
  cache 1
}}
"""
