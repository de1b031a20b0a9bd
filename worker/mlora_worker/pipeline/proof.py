"""How two ranks prove to each other that they know their pipeline's token, without sending it. Pure: bytes in, bytes out.

=====================  =====================================================  ========================================
who speaks             what                                                   what the other one knows then
=====================  =====================================================  ========================================
the caller             magic, version, rank, a random number                  nothing
rank 0                 a random number, the run's digest, tag("rank 0")       it is rank 0, and it has heard this caller
the caller             tag("caller")                                          it is a rank, and it has heard this rank 0
rank 0                 tag("welcome")                                         the caller is taken
=====================  =====================================================  ========================================

A tag is HMAC-SHA256 over who speaks and over all that both have said, what they know of each other before (the number of
ranks), and the TLS channel that it travels in. So no tag can be sent back to whoever made it, be used a second time, for
another rank or run, or be handed on through another channel. The key follows from token and pipeline by HKDF (RFC 5869),
so it is good for nothing else. Every message has one length: there is nothing to parse.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass

NONCE = TAG = 32  # bytes
_MAGIC, _VERSION = b"mLoRA-lk", 2
_HELLO = struct.Struct(f"!8sHI{NONCE}s")
_ANSWER = struct.Struct(f"!{NONCE}s32s{TAG}s")
HELLO, ANSWER = _HELLO.size, _ANSWER.size

_SALT = b"mlora_worker.pipeline.link"


class Unproven(ConnectionError):
    """Whoever is at the other end did not prove that it belongs to this pipeline; the message says how far it got."""


def derive_key(token: str, pipeline: str) -> bytes:
    """The key of a pipeline's links. Raises ``Unproven`` for an empty token, by which anybody could prove themselves."""
    if not token:
        raise Unproven("the pipeline's token is empty: delete its Secret, and the operator creates a new one")
    secret = hmac.digest(_SALT, token.encode(errors="surrogateescape"), "sha256")
    return hmac.digest(secret, pipeline.encode() + b"\x01", "sha256")


def digest_of(run: str) -> bytes:
    """What is said of a run to whoever has not proven anything yet."""
    return hashlib.sha256(run.encode()).digest()


@dataclass(frozen=True, slots=True)
class Hello:
    """A caller's first words."""

    rank: int
    nonce: bytes

    def pack(self) -> bytes:
        return _HELLO.pack(_MAGIC, _VERSION, self.rank, self.nonce)

    @classmethod
    def unpack(cls, said: bytes, world: int) -> Hello:
        """``said`` has ``HELLO`` bytes. Raises ``Unproven``."""
        magic, version, rank, nonce = _HELLO.unpack(said)
        if magic != _MAGIC:
            raise Unproven("a caller used another protocol")
        if version != _VERSION:
            raise Unproven(f"a caller used version {version} of the link protocol, not {_VERSION}")
        if not 0 < rank < world:
            raise Unproven(f"a caller called itself rank {rank} of {world}")
        return cls(rank, nonce)


@dataclass(frozen=True, slots=True)
class Meeting:
    """All that both ends know of one call before either has proven anything. ``channel``: what TLS says of the connection,
    the same at both ends and nowhere else; empty without TLS."""

    key: bytes
    world: int
    hello: Hello
    nonce: bytes  # of rank 0
    run: bytes  # digest of the run that rank 0 gathers
    channel: bytes

    def answer(self) -> bytes:
        return _ANSWER.pack(self.nonce, self.run, self._tag(b"rank 0"))

    @classmethod
    def answered(cls, key: bytes, world: int, hello: Hello, said: bytes, channel: bytes) -> Meeting:
        """The caller's view, once rank 0 has answered with ``ANSWER`` bytes. Raises ``Unproven``."""
        nonce, run, tag = _ANSWER.unpack(said)
        meeting = cls(key, world, hello, nonce, run, channel)
        if not hmac.compare_digest(tag, meeting._tag(b"rank 0")):
            raise Unproven("the peer that acts as rank 0 has another token than this rank")
        return meeting

    def proof(self) -> bytes:
        return self._tag(b"caller")

    def check_proof(self, said: bytes) -> None:
        """Raises ``Unproven``."""
        if not hmac.compare_digest(said, self.proof()):
            raise Unproven(
                f"a caller called itself rank {self.hello.rank}, but does not have this pipeline's token"
            )

    def welcome(self) -> bytes:
        return self._tag(b"welcome")

    def check_welcome(self, said: bytes) -> None:
        """Raises ``Unproven``."""
        if not hmac.compare_digest(said, self.welcome()):
            raise Unproven("rank 0 did not accept this rank's authentication")

    def _tag(self, who: bytes) -> bytes:
        fixed = struct.pack("!8sI", who, self.world)  # all parts but the last have one length each
        said = fixed + self.hello.pack() + self.nonce + self.run + self.channel
        return hmac.digest(self.key, said, "sha256")
