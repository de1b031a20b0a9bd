"""Keys, certificates and tokens of one cluster, made anew for each by openssl in a tenth of a second."""

import base64
import json
import secrets
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.command import run
from tests.cluster.layout import Addresses, State

NODE = "node-0"
EC_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


@dataclass(frozen=True)
class Credentials:
    """Files that the node's programs are started with."""

    folder: Path

    @property
    def authority(self) -> Path:
        """Certificate that signs all others."""
        return self.folder / "ca.crt"

    @property
    def tokens(self) -> Path:
        """Tokens that the API server accepts."""
        return self.folder / "tokens.csv"

    @property
    def admin(self) -> Path:
        """Access for the cluster's own programs and for people."""
        return self.folder / "admin.kubeconfig"

    @property
    def kubelet(self) -> Path:
        """Access for the kubelet: what a node may do, no more."""
        return self.folder / "kubelet.kubeconfig"

    def certificate(self, name: str) -> Path:
        """Certificate of ``name``."""
        return self.folder / f"{name}.crt"

    def key(self, name: str) -> Path:
        """Private key of ``name``."""
        return self.folder / f"{name}.key"


def create(state: State, addresses: Addresses) -> Credentials:
    """Write all credentials of a new cluster and the kubeconfig that people use."""
    made = Credentials(state.configuration / "pki")
    made.folder.mkdir(parents=True, mode=0o700)
    run("openssl", "req", "-x509", *EC_KEY, "-days", "3650", "-subj", "/CN=mlora-test-cluster",
        "-keyout", made.key("ca"), "-out", made.authority)  # fmt: skip
    names = ["kubernetes", "kubernetes.default", "kubernetes.default.svc", "localhost"]
    ips = [addresses.node, addresses.kubernetes_service, "127.0.0.1"]
    sign(
        made,
        "apiserver",
        "/CN=kube-apiserver",
        [f"DNS:{name}" for name in names] + [f"IP:{ip}" for ip in ips],
    )
    # As whom the API server asks the kubelet for logs and exec.
    sign(made, "kubelet-client", "/O=system:masters/CN=kube-apiserver-kubelet-client", [])
    run("openssl", "genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256",
        "-out", made.key("service-accounts"))  # fmt: skip
    run(
        "openssl",
        "pkey",
        "-in",
        made.key("service-accounts"),
        "-pubout",
        "-out",
        made.folder / "service-accounts.pub",
    )

    admin, kubelet = secrets.token_hex(16), secrets.token_hex(16)
    made.tokens.write_text(
        f'{admin},admin,admin,"system:masters"\n{kubelet},system:node:{NODE},{NODE},"system:nodes"\n'
    )
    write_kubeconfig(made.admin, made, addresses, admin)
    write_kubeconfig(made.kubelet, made, addresses, kubelet)
    write_kubeconfig(state.kubeconfig, made, addresses, admin)
    return made


def sign(made: Credentials, name: str, subject: str, alternative_names: list[str]) -> None:
    """Make a key and a certificate for ``name``, signed by the cluster's authority."""
    names = ["-addext", "subjectAltName=" + ",".join(alternative_names)] if alternative_names else []
    run("openssl", "req", "-x509", *EC_KEY, "-days", "3650", "-subj", subject, *names,
        "-addext", "basicConstraints=critical,CA:FALSE", "-CA", made.authority, "-CAkey", made.key("ca"),
        "-keyout", made.key(name), "-out", made.certificate(name))  # fmt: skip


def write_kubeconfig(path: Path, made: Credentials, addresses: Addresses, token: str) -> None:
    """Write access with ``token`` as a kubeconfig file (JSON is YAML too)."""
    authority = base64.b64encode(made.authority.read_bytes()).decode()
    server = {"server": addresses.api_server, "certificate-authority-data": authority}
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "mlora-test", "cluster": server}],
        "users": [{"name": "mlora-test", "user": {"token": token}}],
        "contexts": [{"name": "mlora-test", "context": {"cluster": "mlora-test", "user": "mlora-test"}}],
        "current-context": "mlora-test",
    }
    path.touch(mode=0o600)
    path.write_text(json.dumps(content, indent=2))
