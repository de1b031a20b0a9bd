"""The side channel: descriptors from rank 0 to every rank, reports from every rank to rank 0, and who belongs to the group.

The links *are* the group. Rank 0 accepts exactly one connection for each other rank, then hands out a fresh run id; the
rendezvous of torch.distributed happens under that id, so a rank of a former group can never meet a new one. When one link
breaks, the group is over: every rank ends, and all start again together. Why so: docs/contributors/decisions/.

Both ends prove themselves before anything else is said (``proof.py``); rank 0 listens to all callers at once (``door.py``).
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping

from mlora_worker.pipeline.channel import Channel
from mlora_worker.pipeline.door import PATIENCE, Door, DoorClosed
from mlora_worker.pipeline.frames import (
    Header,
    LinkClosed,
    MakeBuffer,
    Payload,
    keep_alive,
    plain_buffer,
    receive_frame,
    send_frame,
)
from mlora_worker.pipeline.hello import Membership, Met, Trust, Words, call, welcome
from mlora_worker.pipeline.listening import listen
from mlora_worker.pipeline.proof import Unproven, digest_of

_PAUSE = 0.2  # seconds between calls
_PAUSE_UNPROVEN = (
    1.0  # the same, where who answered has proven nothing: the kubelet needs a while to bring a new token
)

OnMessage = Callable[[int, Header, Payload], None]
OnLost = Callable[[LinkClosed], None]


class Hub:
    """Rank 0's end."""

    def __init__(self, peers: dict[int, Channel], door: Door | None, run_id: str) -> None:
        """``door``: None where nobody is expected."""
        self._peers = peers
        self._door = door
        self.run_id = run_id
        self.sent_bytes = 0

    @classmethod
    def gather(
        cls,
        port: int,
        group: Membership,
        run_id: str,
        *,
        host: str = "",
        tls: ssl.SSLContext | None = None,
        told: Header | None = None,
        timeout: float = 600.0,
    ) -> Hub:
        """Wait until all other ranks have called, then start the group; each gets to know what is ``told``. Raises
        ``TimeoutError`` naming who is missing."""
        if group.world == 1:
            return cls({}, None, run_id)
        run = digest_of(run_id)
        door = Door(listen(host, port), lambda sock: welcome(sock, group, run, tls, os.urandom))
        peers: dict[int, Channel] = {}
        until = time.monotonic() + timeout
        while len(peers) < group.world - 1:
            try:
                met = door.next(until)
            except TimeoutError:
                door.leave()
                missing = sorted(set(range(1, group.world)) - peers.keys())
                raise TimeoutError(_missed(missing, timeout, door)) from None
            if met.rank in peers:  # the rank restarted while we waited for others: the newer one counts
                peers[met.rank].close()
            peers[met.rank] = Channel(met.sock)
        for channel in peers.values():
            send_frame(channel, {"run": run_id, "told": told or {}})
        return cls(peers, door, run_id)

    def start(self, on_message: OnMessage, on_lost: OnLost, buffer: MakeBuffer = plain_buffer) -> None:
        """Read every link in a thread of its own; a further caller means that a rank restarted, so the group is over.
        ``buffer``: where payloads are received."""
        for rank, channel in self._peers.items():
            threading.Thread(
                target=_read,
                args=(rank, channel, on_message, on_lost, buffer),
                name=f"link-{rank}",
                daemon=True,
            ).start()
        if self._door is not None:
            threading.Thread(target=_watch, args=(self._door, on_lost), name="link-door", daemon=True).start()

    def broadcast(self, header: Header, payload_for: Mapping[int, Payload]) -> None:
        """Send a descriptor to every rank; ``payload_for`` has the ranks that also get a payload."""
        for rank, channel in self._peers.items():
            self.sent_bytes += send_frame(channel, header, payload_for.get(rank, b""))

    def close(self) -> None:
        for channel in self._peers.values():
            channel.close()
        if self._door is not None:
            self._door.close()


class Spoke:
    """The end of every other rank."""

    def __init__(self, channel: Channel, run_id: str, told: Header) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self.run_id = run_id
        self.told = told  # by rank 0, to all alike
        self.sent_bytes = 0

    @classmethod
    def join(
        cls,
        host: str,
        port: int,
        group: Membership,
        rank: int,
        *,
        trust: Trust | None = None,
        timeout: float = 600.0,
    ) -> Spoke:
        """Call rank 0 until it answers and has proven itself, then wait for the group to be complete. Raises
        ``TimeoutError`` with the last reason why not."""
        deadline, doubts = time.monotonic() + timeout, None
        while True:
            try:
                met = _call(host, port, group, rank, trust, deadline)
                break
            except OSError as error:
                # Not up yet, its name does not resolve yet, or its files and this rank's are not yet of one age.
                doubts = error if isinstance(error, Unproven) else doubts
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"rank 0 at {host}:{port} did not answer within {timeout:.0f} s: {doubts or error}"
                    ) from error
                time.sleep(_PAUSE_UNPROVEN if error is doubts else _PAUSE)
        channel = Channel(met.sock)
        channel.settimeout(max(1.0, deadline - time.monotonic()))
        header, _ = receive_frame(channel)
        channel.settimeout(None)
        run_id = str(header["run"])
        if digest_of(run_id) != met.run:
            raise LinkClosed("rank 0 authenticated for one run and announced another")
        return cls(channel, run_id, header["told"])

    def start(self, on_message: OnMessage, on_lost: OnLost, buffer: MakeBuffer = plain_buffer) -> None:
        threading.Thread(
            target=_read, args=(0, self._channel, on_message, on_lost, buffer), name="link-0", daemon=True
        ).start()

    def send(self, header: Header, payload: Payload = b"") -> None:
        with self._lock:
            self.sent_bytes += send_frame(self._channel, header, payload)

    def close(self) -> None:
        self._channel.close()


def _call(host: str, port: int, group: Membership, rank: int, trust: Trust | None, deadline: float) -> Met:
    """One call. Raises ``OSError``, which ``Unproven`` is."""
    sock = socket.create_connection((host, port), timeout=PATIENCE)
    with contextlib.ExitStack() as unless_met:
        unless_met.callback(sock.close)
        sock.setblocking(False)
        keep_alive(sock)
        words = call(sock, group, rank, trust, os.urandom)
        unless_met.callback(words.close)
        met = _drive(words, sock.fileno(), min(deadline, time.monotonic() + PATIENCE))
        unless_met.pop_all()
    return met


def _drive(words: Words, number: int, until: float) -> Met:
    """All of ``words``, over the descriptor ``number``. Raises ``TimeoutError``, and what they raise."""
    while True:
        try:
            event = next(words)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]
        poll = select.poll()
        poll.register(number, select.POLLIN if event == selectors.EVENT_READ else select.POLLOUT)
        if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
            raise TimeoutError("the peer that acts as rank 0 did not authenticate in time")


def _watch(door: Door, on_lost: OnLost) -> None:
    """Whoever proves to be a rank of this group has started again."""
    while True:
        try:
            met = door.next()
        except DoorClosed:
            return
        met.sock.close()
        on_lost(LinkClosed(f"rank {met.rank} has restarted"))


def _missed(missing: list[int], timeout: float, door: Door) -> str:
    words = f"ranks {missing} did not connect within {timeout:.0f} s; look at their pods"
    if door.turned_away:
        words += f"; {door.turned_away} connections were rejected, the last one because {door.complaint}"
    return words


def _read(rank: int, channel: Channel, on_message: OnMessage, on_lost: OnLost, buffer: MakeBuffer) -> None:
    try:
        while True:  # a payload is not held here while the next message is waited for
            on_message(rank, *receive_frame(channel, buffer=buffer))
    except LinkClosed as error:
        on_lost(error)
    except Exception as error:  # a message that cannot be handled must not leave a deaf rank behind
        on_lost(LinkClosed(f"a message of rank {rank} could not be handled: {error!r}"))
