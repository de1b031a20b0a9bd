"""The image of the pods' sandbox container: one static program, packed without any image tool."""

import hashlib
import io
import json
import tarfile
from pathlib import Path

from tests.cluster.cache import artefact
from tests.cluster.configuration import PAUSE_IMAGE
from tests.cluster.gobinaries import pause


def pause_archive() -> Path:
    """The image as a docker archive, which containerd imports."""
    program = pause()
    return artefact(
        "pause-image",
        program.read_bytes() + Path(__file__).read_bytes(),
        lambda target: pack(program, target),
    )


def pack(program: Path, target: Path) -> None:
    """Write an image whose only layer holds ``program`` and whose entry point it is."""
    layer = tar({"pause": program.read_bytes()})
    configuration = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Entrypoint": ["/pause"], "User": "65535:65535"},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [PAUSE_IMAGE], "Layers": ["layer.tar"]}]
    files = {"config.json": configuration, "manifest.json": manifest}
    content = {name: json.dumps(value).encode() for name, value in files.items()}
    target.write_bytes(tar({**content, "layer.tar": layer}))


def tar(files: dict[str, bytes]) -> bytes:
    """A tar archive of executable files, the same bytes for the same content."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o755
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()
