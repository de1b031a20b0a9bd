"""The first words on a connection between ranks (``proof.py``), said over sockets that never block.

Each side is a generator: it yields what it waits for (``selectors.EVENT_READ`` or ``EVENT_WRITE``), so that one thread can
listen to many callers, however slowly they speak, and whoever drives it ends it when its time is over.
"""

from __future__ import annotations

import selectors
import socket
import ssl
from collections.abc import Callable, Generator
from dataclasses import dataclass

from mlora_worker.pipeline.proof import ANSWER, HELLO, NONCE, TAG, Hello, Meeting, Unproven, derive_key

Words = Generator[int, None, "Met"]
Random = Callable[[int], bytes]


@dataclass(frozen=True, slots=True)
class Met:
    """Both have proven themselves. ``sock`` takes the place of the one that was given."""

    sock: socket.socket
    rank: int  # of the caller
    run: bytes  # digest


@dataclass(frozen=True, slots=True)
class Membership:
    """What the ranks of one pipeline have in common. ``token`` is read at each call: the kubelet brings a new one while
    ranks wait for each other. It may raise ``OSError`` and ``ValueError``."""

    pipeline: str
    world: int
    token: Callable[[], str]

    def key(self) -> bytes:
        """Raises ``Unproven``, or another ``OSError``."""
        try:
            return derive_key(self.token(), self.pipeline)
        except ValueError as error:
            raise Unproven(f"the pipeline's token is not text: {error}") from None


@dataclass(frozen=True, slots=True)
class Trust:
    """How a caller knows rank 0's certificate. ``context`` is asked for at each call and may raise ``OSError``."""

    context: Callable[[], ssl.SSLContext]
    host: str


def welcome(
    sock: socket.socket, group: Membership, run: bytes, tls: ssl.SSLContext | None, random: Random
) -> Words:
    """Rank 0's side. Raises ``Unproven``, or another ``OSError``."""
    if tls is not None:
        sock = tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
    try:
        channel = yield from _encrypted(sock)
        hello = Hello.unpack((yield from _hear(sock, HELLO)), group.world)
        meeting = Meeting(group.key(), group.world, hello, random(NONCE), run, channel)
        yield from _say(sock, meeting.answer())
        doubts = f", so rank {hello.rank} may have another token than this rank"
        meeting.check_proof((yield from _hear(sock, TAG, doubts)))
        yield from _say(sock, meeting.welcome())
    except BaseException:
        sock.close()
        raise
    return Met(sock, hello.rank, run)


def call(sock: socket.socket, group: Membership, rank: int, trust: Trust | None, random: Random) -> Words:
    """The side of any other rank. Raises ``Unproven``, or another ``OSError``."""
    if trust is not None:
        sock = trust.context().wrap_socket(sock, server_hostname=trust.host, do_handshake_on_connect=False)
    try:
        channel = yield from _encrypted(sock)
        hello, key = Hello(rank, random(NONCE)), group.key()
        yield from _say(sock, hello.pack())
        meeting = Meeting.answered(key, group.world, hello, (yield from _hear(sock, ANSWER)), channel)
        yield from _say(sock, meeting.proof())
        meeting.check_welcome((yield from _hear(sock, TAG)))
    except BaseException:
        sock.close()
        raise
    return Met(sock, rank, meeting.run)


def _encrypted(sock: socket.socket) -> Generator[int, None, bytes]:
    """What names this TLS connection and no other, at both ends alike: the client's last word of the handshake. Empty in
    plain.

    Of TLS 1.3 alone: there that word is a MAC, by a key of this connection, over all that was said in the handshake.
    """
    if not isinstance(sock, ssl.SSLSocket):
        return b""
    while True:
        try:
            sock.do_handshake()
            break
        except ssl.SSLWantReadError:
            yield selectors.EVENT_READ
        except ssl.SSLWantWriteError:
            yield selectors.EVENT_WRITE
        except ssl.SSLCertVerificationError as error:
            raise Unproven(
                f"the peer that acts as rank 0 has another certificate than this pipeline: {error.verify_message}"
            ) from None
        except OSError as error:  # as of an end that does not encrypt, which hangs up or answers in plain
            why = getattr(error, "reason", None) or error.strerror or error
            raise Unproven(f"the TLS handshake with the peer failed: {why}") from None
    if sock.version() != "TLSv1.3":
        raise Unproven(f"links need TLS 1.3, but the peer uses {sock.version()}")
    binding = sock.get_channel_binding("tls-unique")
    if not binding:
        raise Unproven("this build of OpenSSL does not support TLS channel binding")
    return binding


def _hear(sock: socket.socket, length: int, doubts: str = "") -> Generator[int, None, bytes]:
    heard = b""
    while len(heard) < length:
        try:
            more = sock.recv(length - len(heard))
        except (BlockingIOError, ssl.SSLWantReadError):
            yield selectors.EVENT_READ
        except ssl.SSLWantWriteError:
            yield selectors.EVENT_WRITE
        else:
            if not more:
                raise Unproven(f"the peer closed the connection after {len(heard)} of {length} bytes{doubts}")
            heard += more
    return heard


def _say(sock: socket.socket, words: bytes) -> Generator[int, None, None]:
    while words:
        try:
            words = words[sock.send(words) :]
        except (BlockingIOError, ssl.SSLWantWriteError):
            yield selectors.EVENT_WRITE
        except ssl.SSLWantReadError:
            yield selectors.EVENT_READ
