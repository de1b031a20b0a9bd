"""A base image without a registry: Debian with its Python, from Debian's packages."""

import hashlib
from pathlib import Path

from tests.cluster.cache import artefact, cache_root, locked, remove
from tests.cluster.command import CommandFailed, run

SUITE = "bookworm"
PACKAGES = "python3,python3-venv,ca-certificates"
NOT_NEEDED = ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/man", "usr/share/locale")


def root_filesystem() -> Path:
    """The root file system as a tar archive; one to two minutes the first time."""
    return artefact("rootfs.tar", Path(__file__).read_bytes(), build)


def build(target: Path) -> None:
    """Install Debian into a folder and pack it without caches and documentation."""
    folder = target.with_name(target.name + ".folder")
    remove(folder)
    # debootstrap mounts /proc in the folder. In namespaces of its own that mount ends with it, even if it is
    # killed; removing the folder in the next run would otherwise walk into it.
    isolated = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
    run(*isolated, "debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, folder)
    excluded = [f"--exclude=./{path}/*" for path in NOT_NEEDED]
    run("tar", "--create", "--file", target, "--directory", folder, "--numeric-owner", *excluded, ".")
    remove(folder)


def base_image() -> str:
    """Name of the base image in buildah's store, made from the root file system when it is not there."""
    archive = root_filesystem()
    name = f"localhost/mlora-base:{hashlib.sha256(archive.name.encode()).hexdigest()[:12]}"
    with locked(cache_root() / ".base-image.lock"):
        if not exists(name):
            container = run("buildah", "from", "scratch").strip()
            try:
                run("buildah", "add", container, archive, "/")
                run("buildah", "config", "--cmd", "/bin/sh", "--env", "LANG=C.UTF-8", container)
                run("buildah", "commit", "--quiet", container, name)
            finally:
                run("buildah", "rm", container)
    return name


def exists(image: str) -> bool:
    """Whether buildah has ``image``."""
    try:
        run("buildah", "inspect", "--type", "image", image)
    except CommandFailed:
        return False
    return True
