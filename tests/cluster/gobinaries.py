"""The programs that Go builds: the cluster's own (see ``program/``) and Helm, each kept once built."""

import os
import re
from pathlib import Path

from tests.cluster.cache import artefact
from tests.cluster.command import run

HERE = Path(__file__).parent
PROGRAM = HERE / "program"
HELM = HERE / "helm"


def testcluster() -> Path:
    """The program that is etcd, the control plane, kubelet, kube-proxy and CoreDNS; 6 to 8 minutes cold."""
    kubernetes = required_version(PROGRAM / "go.mod", "k8s.io/kubernetes")
    major, minor, _ = kubernetes.removeprefix("v").split(".")
    stamps = {"gitVersion": kubernetes, "gitMajor": major, "gitMinor": minor}
    flags = [f"-X k8s.io/component-base/version.{name}={value}" for name, value in stamps.items()]
    return go_build("testcluster", PROGRAM, ".", flags)


def pause() -> Path:
    """The program of a pod's sandbox container, statically linked."""
    return go_build("pause", PROGRAM, "./pause", [], static=True)


def helm() -> Path:
    """Helm, the real one; 2 minutes cold."""
    version = required_version(HELM / "go.mod", "helm.sh/helm/v3")
    return go_build(
        "helm", HELM, "helm.sh/helm/v3/cmd/helm", [f"-X helm.sh/helm/v3/internal/version.version={version}"]
    )


def go_build(name: str, module: Path, package: str, linker_flags: list[str], static: bool = False) -> Path:
    """The binary of ``package`` in the module at ``module``, without symbols.

    Which compiler builds it is not part of the hash: any that can will do.
    """
    sources = sorted(path for path in module.rglob("*") if path.suffix in {".go", ".mod", ".sum"})
    made_from = (
        b"\0".join(path.read_bytes() for path in sources) + " ".join([package, *linker_flags]).encode()
    )

    def build(target: Path) -> None:
        flags = " ".join(["-s", "-w", *linker_flags])
        environment = {**os.environ, "CGO_ENABLED": "0"} if static else None
        run("go", "build", "-trimpath", "-ldflags", flags, "-o", target, package, cwd=module, env=environment)

    return artefact(name, made_from, build)


def required_version(go_mod: Path, module: str) -> str:
    """Version of ``module`` that the ``go.mod`` file pins."""
    found = re.search(rf"^\s*(?:require )?{re.escape(module)} (v\S+)", go_mod.read_text(), re.MULTILINE)
    if found is None:
        raise ValueError(f"{go_mod} does not require {module}")
    return found[1]
