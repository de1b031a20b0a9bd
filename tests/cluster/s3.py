"""SeaweedFS as the object store: beside a cluster, or alone on the loopback address for tests without one."""

import json
import os
import secrets
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.cluster.command import CommandFailed, run

BUCKETS = ("models", "datasets", "adapters", "checkpoints")
INSIDE = "http://s3.storage:8333"
PARTS = {"s3": 0, "master": 1, "volume": 2, "filer": 3}
"""The server's parts, with their ports as distances from the S3 port."""
GRPC = len(PARTS)
"""Distance from a part's port to its gRPC port."""
PORTS = 2 * len(PARTS)
"""How many ports a server uses, from its S3 port up."""


@dataclass(frozen=True)
class Access:
    """How to reach an object store and as whom."""

    endpoint: str
    """URL for programs on this machine."""
    inside: str
    """URL for pods; the same as ``endpoint`` where there is no cluster."""
    access_key: str
    secret_key: str
    region: str = "us-east-1"

    def write(self, path: Path) -> None:
        """Keep this in a file that only its owner reads."""
        path.touch(mode=0o600)
        path.write_text(json.dumps(asdict(self), indent=2))


def read_access(path: Path) -> Access:
    """What ``Access.write`` kept."""
    return Access(**json.loads(path.read_text()))


def weed_command(weed: Path, folder: Path, address: str, port: int) -> list[str]:
    """Command line of a server on ``address`` with its data and its keys (see ``prepare``) in ``folder``."""
    # All named, so that two servers never meet.
    parts = [f"-{part}.port={port + offset}" for part, offset in PARTS.items()]
    parts += [f"-{part}.port.grpc={port + offset + GRPC}" for part, offset in PARTS.items()]
    return [
        str(weed),
        "-logtostderr=true",
        "server",
        f"-dir={folder}/data",
        f"-ip={address}",
        f"-ip.bind={address}",
        "-s3",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        # A typing error in a bucket's name must fail as it does on other servers.
        "-s3.autoCreateBucket=false",
        f"-s3.config={folder}/keys.json",
        # Small volumes, allocated as they fill: a test writes megabytes, and the default reserves 30 GB each.
        "-master.volumeSizeLimitMB=1024",
        "-volume.max=0",
        # A server that was killed elects itself anew; nobody else could win.
        "-master.electionTimeout=1s",
        "-master.telemetry=false",
        *parts,
    ]


def prepare(folder: Path, endpoint: str, inside: str) -> Access:
    """Make the data folder and new keys for a server; they may do everything."""
    access = Access(endpoint, inside, secrets.token_hex(10), secrets.token_hex(20))
    (folder / "data").mkdir(parents=True)
    credentials = [{"accessKey": access.access_key, "secretKey": access.secret_key}]
    identity = {
        "name": "tests",
        "credentials": credentials,
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    keys = folder / "keys.json"
    keys.touch(mode=0o600)
    keys.write_text(json.dumps({"identities": [identity]}))
    return access


def shell(weed: Path, address: str, port: int, commands: str) -> str:
    """What the server's own shell says to ``commands``, one a line; it asks for no signed requests."""
    addresses = {
        part: f"{address}:{port + PARTS[part]}.{port + PARTS[part] + GRPC}" for part in ("master", "filer")
    }
    return run(
        str(weed), "shell", f"-master={addresses['master']}", f"-filer={addresses['filer']}", stdin=commands
    )


def create_buckets(weed: Path, address: str, port: int) -> None:
    """Create the project's buckets."""
    said = shell(weed, address, port, "".join(f"s3.bucket.create -name {bucket}\n" for bucket in BUCKETS))
    missing = [bucket for bucket in BUCKETS if f"created bucket {bucket}" not in said]
    if missing:
        raise CommandFailed(f"the object store did not create the buckets {', '.join(missing)}: {said}")


def answers(endpoint: str) -> bool:
    """Whether the server at ``endpoint`` says that it works."""
    try:
        with urllib.request.urlopen(f"{endpoint}/healthz", timeout=2) as reply:
            return int(reply.status) == 200
    except (OSError, urllib.error.URLError):
        return False


@contextmanager
def serve(weed: Path, folder: Path) -> Iterator[Access]:
    """A server on the loopback address that ends with the block, keys and data in ``folder``.

    Raises ``TimeoutError`` when it does not answer within half a minute; its log is in ``folder``.
    """
    port = free_ports(PORTS)
    endpoint = f"http://127.0.0.1:{port}"
    access = prepare(folder, endpoint, endpoint)
    log = folder / "log"
    with log.open("w") as output:
        server = subprocess.Popen(
            weed_command(weed, folder, "127.0.0.1", port),
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
        )
    try:
        deadline = time.monotonic() + 30
        while not answers(endpoint):
            if server.poll() is not None or time.monotonic() > deadline:
                raise TimeoutError(f"SeaweedFS does not answer at {endpoint}; see {log}")
            time.sleep(0.1)
        create_buckets(weed, "127.0.0.1", port)
        yield access
    finally:
        server.kill()
        server.wait()
        remove_sockets(port)


def remove_sockets(port: int) -> None:
    """Remove the sockets that the server with S3 port ``port`` keeps in /tmp, whatever its data folder is."""
    for used in range(port, port + PORTS):
        for leftover in Path("/tmp").glob(f"seaweedfs-*-{used}.sock"):
            leftover.unlink(missing_ok=True)


def free_ports(count: int) -> int:
    """First of ``count`` ports in a row that nobody on the loopback address listens on. Each process begins at another one:
    until a server listens, others find its ports free."""
    firsts = range(18300, 30000 - count, count)
    for place in range(len(firsts)):
        first = firsts[(os.getpid() + place) % len(firsts)]
        try:
            for port in range(first, first + count):
                with closing(socket.socket()) as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise OSError("no free range of ports on the loopback address")
