"""The Debian packages that a cluster needs: installed when a program of theirs is missing."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from tests.cluster.command import run

# A file or program that shows that the package is there, because asking dpkg is slower and a machine may have
# the program from elsewhere.
EVIDENCE = {
    "containerd": "containerd",
    "runc": "runc",
    "containernetworking-plugins": "/usr/lib/cni/bridge",
    "iptables": "iptables",
    "iproute2": "ip",
    "conntrack": "conntrack",
    "openssl": "openssl",
    "util-linux": "unshare",
    "buildah": "buildah",
    "debootstrap": "debootstrap",
    "ca-certificates": "/etc/ssl/certs/ca-certificates.crt",
}

# What the tests of the operator's page look at it with. No cluster needs it.
BROWSER = {"chromium": "chromium"}


def missing(evidence: Mapping[str, str]) -> list[str]:
    """Packages whose evidence is not on this machine."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    return [
        package
        for package, proof in evidence.items()
        if not (Path(proof).exists() if proof.startswith("/") else shutil.which(proof, path=path))
    ]


def install_missing(evidence: Mapping[str, str] = EVIDENCE) -> None:
    """Install what is missing, without its recommendations; needs root."""
    packages = missing(evidence)
    if not packages:
        return
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    run("apt-get", "update", "-qq", env=quiet)
    # A Debian package starts its service (containerd) where there is an init system; this one runs its own.
    run("apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages, env=quiet)
