"""A group of links on loopback, in plain or in TLS, and strangers who call at its door."""

from __future__ import annotations

import functools
import queue
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mlora_operator.certificates import self_signed
from mlora_operator.manifests.secret import CertificatePair
from mlora_worker.pipeline.frames import LinkClosed
from mlora_worker.pipeline.hello import Membership, Trust
from mlora_worker.pipeline.link import Hub, Spoke
from mlora_worker.runtime.tls import client_context, server_context

HOST = "mlora-toy-0.mlora-toy.team-a.svc"
TOKEN = "secret"


@functools.cache
def pair(number: int = 0, host: str = HOST) -> CertificatePair:
    """Certificates for the tests' name; each number has its own key."""
    del number
    return self_signed(host, datetime.now(UTC))


def put(folder: Path, made: CertificatePair) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in (("tls.crt", made.certificate), ("tls.key", made.key)):
        (folder / "new").write_text(text)
        (folder / "new").rename(folder / name)
    return folder


@dataclass
class Ear:
    messages: queue.Queue[Any] = field(default_factory=queue.Queue)
    lost: queue.Queue[LinkClosed] = field(default_factory=queue.Queue)

    def hear(self, rank: int, header: dict[str, Any], payload: bytes) -> None:
        self.messages.put((rank, header, payload))


@dataclass
class Place:
    """Where rank 0 listens, and the files of its pipeline. ``folder``: of the certificate; None: in plain."""

    folder: Path | None = None
    host: str = "127.0.0.1"
    token: Callable[[], str] = lambda: TOKEN
    port: int = 0

    def __post_init__(self) -> None:
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        with socket.create_server((self.host, 0), family=family) as sock:
            self.port = int(sock.getsockname()[1])

    def membership(self, world: int) -> Membership:
        return Membership("team-a/toy", world, self.token)

    @property
    def server(self) -> ssl.SSLContext | None:
        return server_context(self.folder, HOST) if self.folder else None

    @property
    def trust(self) -> Trust | None:
        folder = self.folder
        return Trust(lambda: client_context(folder), HOST) if folder else None

    def gather(self, world: int = 2, run: str = "run-1", **more: Any) -> Hub:
        return Hub.gather(self.port, self.membership(world), run, host=self.host, tls=self.server, **more)

    def join(self, rank: int = 1, world: int = 2, **more: Any) -> Spoke:
        return Spoke.join(
            self.host, self.port, self.membership(world), rank, trust=more.pop("trust", self.trust), **more
        )

    def knock(self, source: str = "") -> socket.socket:
        """Somebody who calls, and has said nothing yet."""
        begun = threading.Event()
        for _ in range(100):
            try:
                return socket.create_connection(
                    (self.host, self.port), timeout=10, source_address=(source, 0) if source else None
                )
            except ConnectionRefusedError:
                begun.wait(0.02)
        raise AssertionError("rank 0 does not listen")


class Soon:
    """What ``work`` gives, in a thread of its own; for one ``get``."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._answers: queue.Queue[Any] = queue.Queue()

        def run() -> None:
            try:
                self._answers.put((work(), None))
            except BaseException as error:
                self._answers.put((None, error))

        threading.Thread(target=run, daemon=True).start()

    def get(self, seconds: float = 10) -> Any:
        answer, error = self._answers.get(timeout=seconds)
        if error is not None:
            raise error
        return answer


@dataclass
class Group:
    place: Place
    hub: Hub
    ear: Ear
    spokes: list[Spoke]
    ears: list[Ear]


def group(place: Place, world: int, hear: Callable[..., Any] | None = None) -> Group:
    gathering = Soon(lambda: place.gather(world))
    joining = [Soon(lambda rank=rank: place.join(rank, world)) for rank in range(1, world)]
    hub, spokes = gathering.get(), [one.get() for one in joining]
    ear, ears = Ear(), [Ear() for _ in spokes]
    hub.start(hear or ear.hear, ear.lost.put)
    for spoke, own in zip(spokes, ears, strict=True):
        spoke.start(own.hear, own.lost.put)
    return Group(place, hub, ear, spokes, ears)


def hung_up(sock: socket.socket) -> bool:
    """Whether the other end ends the call, whatever it says before; True once it has."""
    try:
        while sock.recv(1000):
            pass
    except ConnectionResetError:
        pass
    return True
