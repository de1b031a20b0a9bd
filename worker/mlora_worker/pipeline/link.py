"""The side channel: descriptors from rank 0 to every rank, reports from every rank to rank 0, and who belongs to the group.

The links *are* the group. Rank 0 accepts exactly one connection for each other rank, then hands out a fresh run id; the
rendezvous of torch.distributed happens under that id, so a rank of a former group can never meet a new one. When one link
breaks, the group is over: every rank ends, and all start again together. Why so: docs/contributors/decisions/.
"""

from __future__ import annotations

import hmac
import socket
import threading
import time
from collections.abc import Callable, Mapping

from mlora_worker.pipeline.frames import Header, LinkClosed, keep_alive, receive_frame, send_frame
from mlora_worker.protocol import PROTOCOL_VERSION

_LONGEST_HELLO = 64 * 2**10  # bytes of what a caller says before it belongs to the group

OnMessage = Callable[[int, Header, bytes], None]
OnLost = Callable[[LinkClosed], None]


class Hub:
    """Rank 0's end."""

    def __init__(
        self, peers: dict[int, socket.socket], listener: socket.socket, token: str, run_id: str
    ) -> None:
        self._peers = peers
        self._listener = listener
        self._token = token
        self.run_id = run_id
        self.sent_bytes = 0

    @classmethod
    def gather(
        cls,
        port: int,
        world: int,
        token: str,
        run_id: str,
        *,
        host: str = "",
        told: Header | None = None,
        timeout: float = 600.0,
    ) -> Hub:
        """Wait until all other ranks have called, then start the group; each gets to know what is ``told``. Raises
        ``TimeoutError`` naming who is missing."""
        listener = socket.create_server((host, port), backlog=world + 8, reuse_port=False)
        peers: dict[int, socket.socket] = {}
        deadline = time.monotonic() + timeout
        while len(peers) < world - 1:
            listener.settimeout(max(0.1, deadline - time.monotonic()))
            try:
                sock, _ = listener.accept()
            except TimeoutError:
                missing = sorted(set(range(1, world)) - peers.keys())
                raise TimeoutError(
                    f"ranks {missing} did not call within {timeout:.0f} s; look at their pods"
                ) from None
            rank = _welcome(sock, world, token)
            if rank is None:
                sock.close()
                continue
            if rank in peers:  # the rank restarted while we waited for others: the newer one counts
                peers[rank].close()
            peers[rank] = sock
        for sock in peers.values():
            send_frame(sock, {"run": run_id, "told": told or {}})
        return cls(peers, listener, token, run_id)

    def start(self, on_message: OnMessage, on_lost: OnLost) -> None:
        """Read every link in a thread of its own; a further caller means that a rank restarted, so the group is over."""
        for rank, sock in self._peers.items():
            threading.Thread(
                target=_read, args=(rank, sock, on_message, on_lost), name=f"link-{rank}", daemon=True
            ).start()
        if self._peers:
            threading.Thread(target=self._watch_door, args=(on_lost,), name="link-door", daemon=True).start()

    def broadcast(self, header: Header, payload_for: Mapping[int, bytes]) -> None:
        """Send a descriptor to every rank; ``payload_for`` has the ranks that also get a payload."""
        for rank, sock in self._peers.items():
            self.sent_bytes += send_frame(sock, header, payload_for.get(rank, b""))

    def close(self) -> None:
        for sock in (*self._peers.values(), self._listener):
            sock.close()

    def _watch_door(self, on_lost: OnLost) -> None:
        self._listener.settimeout(None)
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            rank = _welcome(sock, len(self._peers) + 1, self._token)
            sock.close()
            if rank is not None:
                on_lost(LinkClosed(f"rank {rank} has started again"))


class Spoke:
    """The end of every other rank."""

    def __init__(self, sock: socket.socket, run_id: str, told: Header) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self.run_id = run_id
        self.told = told  # by rank 0, to all alike
        self.sent_bytes = 0

    @classmethod
    def join(cls, host: str, port: int, rank: int, token: str, *, timeout: float = 600.0) -> Spoke:
        """Call rank 0 until it answers, then wait for the group to be complete."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                sock = socket.create_connection((host, port), timeout=10)
                break
            except OSError as error:  # not up yet, or its name does not resolve yet
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"rank 0 at {host}:{port} did not answer within {timeout:.0f} s: {error}"
                    ) from error
                time.sleep(0.2)
        keep_alive(sock)
        send_frame(sock, {"rank": rank, "token": token, "version": PROTOCOL_VERSION})
        sock.settimeout(max(1.0, deadline - time.monotonic()))
        header, _ = receive_frame(sock)
        sock.settimeout(None)
        return cls(sock, str(header["run"]), header["told"])

    def start(self, on_message: OnMessage, on_lost: OnLost) -> None:
        threading.Thread(
            target=_read, args=(0, self._sock, on_message, on_lost), name="link-0", daemon=True
        ).start()

    def send(self, header: Header, payload: bytes = b"") -> None:
        with self._lock:
            self.sent_bytes += send_frame(self._sock, header, payload)

    def close(self) -> None:
        self._sock.close()


def _welcome(sock: socket.socket, world: int, token: str) -> int | None:
    """The caller's rank, or None when it is not one of ours. It has shown no token yet: nothing that it sends may end this
    rank, or take its memory.
    """
    try:
        keep_alive(sock)
        sock.settimeout(10)
        header, _ = receive_frame(sock, max_header=_LONGEST_HELLO, max_payload=0)
        sock.settimeout(None)
    except OSError:  # ``LinkClosed`` is one
        return None
    rank = header.get("rank")
    if not isinstance(rank, int) or not 0 < rank < world or header.get("version") != PROTOCOL_VERSION:
        return None
    return rank if hmac.compare_digest(str(header.get("token", "")).encode(), token.encode()) else None


def _read(rank: int, sock: socket.socket, on_message: OnMessage, on_lost: OnLost) -> None:
    try:
        while True:
            header, payload = receive_frame(sock)
            on_message(rank, header, payload)
    except LinkClosed as error:
        on_lost(error)
    except Exception as error:  # a message that cannot be handled must not leave a deaf rank behind
        on_lost(LinkClosed(f"a message of rank {rank} could not be handled: {error!r}"))
