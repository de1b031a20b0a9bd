"""The project's images, built by the Dockerfile as for real use, on a base image that needs no registry.

A change of code takes a few seconds from here to the node, because these images leave the dependencies out
(``INSTALL_DEPS=false``) and find them at ``/opt/env``, where the cluster mounts this machine's environment.
"""

from pathlib import Path

from tests.cluster.command import run
from tests.cluster.layout import CHECKOUT, State
from tests.cluster.rootfs import base_image

TARGETS = ("operator", "worker")


def image_name(target: str) -> str:
    """Name under which pods use the image that the Dockerfile's ``target`` makes."""
    return f"localhost/mlora-{target}:dev"


def build(target: str, base: str, arguments: dict[str, str], name: str) -> str:
    """Build the Dockerfile's ``target`` on ``base`` as ``name``; the image's id."""
    values = [f"--build-arg={key}={value}" for key, value in {"BASE_IMAGE": base, **arguments}.items()]
    output = run(
        "buildah", "bud", "--isolation", "chroot", "--layers", "--quiet", "--pull-never", "--target", target,
        *values, "--tag", name, ".", cwd=CHECKOUT,
    )  # fmt: skip
    return output.split()[-1]


def build_and_import(state: State, socket: Path) -> list[str]:
    """Build both images and import those that the node does not have yet; the names of these."""
    base = base_image()
    imported = []
    for target in TARGETS:
        name = image_name(target)
        identity = build(target, base, {"INSTALL_DEPS": "false"}, name)
        # Goes with the node, as the images in it do.
        has = state.node / f"image-{target}"
        if has.exists() and has.read_text() == identity:
            continue
        archive = state.node / f"image-{target}.tar"
        archive.unlink(missing_ok=True)
        run("buildah", "push", "--quiet", "--disable-compression", name, f"oci-archive:{archive}:{name}")
        import_archive(socket, archive)
        archive.unlink()
        has.write_text(identity)
        imported.append(name)
    return imported


def import_archive(socket: Path, archive: Path) -> None:
    """Put the image in ``archive`` into the containerd at ``socket``, where kubelet looks for images."""
    run("ctr", "--address", socket, "--namespace", "k8s.io", "images", "import", archive)
