"""What rank 0 and a rank say before they are a group: only those who know the token get through, for one rank and run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlora_worker.pipeline.proof import (
    ANSWER,
    HELLO,
    NONCE,
    TAG,
    Hello,
    Meeting,
    Unproven,
    derive_key,
    digest_of,
)

KEY = derive_key("token", "team-a/toy")
ONE, TWO = bytes([1]) * NONCE, bytes([2]) * NONCE
REAL = Meeting(KEY, 3, Hello(1, ONE), TWO, digest_of("run"), b"channel")


def test_two_that_know_the_token_understand_each_other() -> None:
    hello = REAL.hello.pack()
    assert (len(hello), len(REAL.answer()), len(REAL.proof()), len(REAL.welcome())) == (
        HELLO,
        ANSWER,
        TAG,
        TAG,
    )
    assert Hello.unpack(hello, world=3) == REAL.hello
    caller = Meeting.answered(KEY, 3, REAL.hello, REAL.answer(), b"channel")
    assert caller == REAL
    REAL.check_proof(caller.proof())
    caller.check_welcome(REAL.welcome())


def test_the_token_is_in_nothing_that_is_said() -> None:
    token = "a-token-of-some-length"
    meeting = replace(REAL, key=derive_key(token, "team-a/toy"))
    said = meeting.hello.pack() + meeting.answer() + meeting.proof() + meeting.welcome()
    assert token.encode() not in said
    assert meeting.key not in said


OTHERS: list[tuple[str, Callable[[Meeting], Meeting]]] = [
    ("another token", lambda m: replace(m, key=derive_key("Token", "team-a/toy"))),
    ("another pipeline's key of the same token", lambda m: replace(m, key=derive_key("token", "team-b/toy"))),
    ("the token itself as the key", lambda m: replace(m, key=b"token")),
    ("another rank", lambda m: replace(m, hello=replace(m.hello, rank=2))),
    ("another call of the same rank", lambda m: replace(m, hello=replace(m.hello, nonce=TWO))),
    ("another answer of rank 0", lambda m: replace(m, nonce=ONE)),
    ("another run", lambda m: replace(m, run=digest_of("former"))),
    ("another number of ranks", lambda m: replace(m, world=4)),
    ("another TLS connection", lambda m: replace(m, channel=b"their own")),
    ("the TLS handshake", lambda m: replace(m, channel=b"")),
]


@pytest.mark.parametrize(("story", "change"), OTHERS)
def test_what_was_said_elsewhere_proves_nothing_here(
    story: str, change: Callable[[Meeting], Meeting]
) -> None:
    other = change(REAL)
    assert other != REAL, story
    with pytest.raises(Unproven):
        REAL.check_proof(other.proof())
    with pytest.raises(Unproven):
        REAL.check_welcome(other.welcome())
    answer = REAL.answer()[: NONCE + 32] + other.answer()[-TAG:]  # what they say is right, but for the tag
    with pytest.raises(Unproven):
        Meeting.answered(KEY, 3, REAL.hello, answer, b"channel")


@pytest.mark.parametrize("tag", [REAL.answer()[-TAG:], REAL.welcome()])
def test_what_rank_0_says_cannot_be_sent_back_as_a_proof(tag: bytes) -> None:
    with pytest.raises(Unproven):
        REAL.check_proof(tag)


def test_a_proof_cannot_be_sent_back_as_rank_0s_word() -> None:
    with pytest.raises(Unproven):
        REAL.check_welcome(REAL.proof())
    with pytest.raises(Unproven):
        Meeting.answered(KEY, 3, REAL.hello, REAL.answer()[:-TAG] + REAL.proof(), b"channel")


@pytest.mark.parametrize("rank", [0, 3, 2**32 - 1])
def test_a_rank_that_the_group_does_not_have_is_refused(rank: int) -> None:
    with pytest.raises(Unproven, match=f"rank {rank} of 3"):
        Hello.unpack(Hello(rank, ONE).pack(), world=3)


@given(st.binary(min_size=HELLO, max_size=HELLO))
def test_any_bytes_are_a_hello_or_unproven(said: bytes) -> None:
    with contextlib.suppress(Unproven):
        assert Hello.unpack(said, world=3).pack() == said


@given(st.integers(0, ANSWER - 1), st.integers(1, 255))
def test_an_answer_with_one_byte_changed_is_no_answer(place: int, change: int) -> None:
    said = bytearray(REAL.answer())
    said[place] ^= change
    with pytest.raises(Unproven):
        Meeting.answered(KEY, 3, REAL.hello, bytes(said), b"channel")


def test_an_empty_token_makes_no_key() -> None:
    with pytest.raises(Unproven, match="token is empty"):
        derive_key("", "team-a/toy")
