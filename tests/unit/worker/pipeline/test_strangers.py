"""Whoever calls at rank 0's door: nothing that they send, and nothing that they leave unsaid, ends or delays the group."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import ssl
import struct
import threading
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlora_worker.pipeline.channel import Channel
from mlora_worker.pipeline.door import Door
from mlora_worker.pipeline.frames import LinkClosed, receive_frame, send_frame
from mlora_worker.pipeline.hello import Words, call, welcome
from mlora_worker.pipeline.link import _drive
from mlora_worker.pipeline.listening import listen
from mlora_worker.pipeline.proof import HELLO, NONCE, Hello, Unproven, digest_of
from tests.fixtures.stories import stories

from .links import TOKEN, Ear, Place, Soon, group, hung_up, pair, put


def framed(header: bytes, payload: int = 0) -> bytes:
    return struct.pack("!IQ", len(header), payload) + header


FORMER = {"rank": 1, "version": 1}  # how a rank of an older version said who it was
NONSENSE = [
    pytest.param(b"", id="nothing, and hangs up"),
    pytest.param(framed(json.dumps(FORMER | {"token": "\ud800"}).encode()), id="a lone surrogate"),
    pytest.param(framed(json.dumps(FORMER | {"token": TOKEN}).encode()), id="a former version's hello"),
    pytest.param(framed('{"rank":1,"version":1,"token":"ä€😀"}'.encode()), id="text that is not ASCII"),
    pytest.param(framed(b"\xff\xfe\x00"), id="no text"),
    pytest.param(framed(b"[1]"), id="no object"),
    pytest.param(framed(b"[" * 60_000), id="deep JSON"),
    pytest.param(framed(b"{}", 2**28), id="a payload of 256 MiB"),
    pytest.param(b"GET / HTTP/1.1\r\n\r\n" + b"x" * 100, id="another protocol"),
    pytest.param(Hello(1, b"n" * NONCE).pack() + b"p" * 32, id="a proof that was guessed"),
    pytest.param(Hello(2**31, b"n" * NONCE).pack(), id="a rank that there is not"),
    pytest.param(os.urandom(100_000), id="a hundred thousand random bytes"),
]


@pytest.fixture(params=["plain", "tls"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return Place(put(tmp_path / "tls", pair()) if request.param == "tls" else None)


def inside(place: Place, sock: socket.socket) -> socket.socket:
    """A stranger can begin TLS, too."""
    if place.folder is None:
        return sock
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context.wrap_socket(sock)


@pytest.mark.parametrize("sent", NONSENSE)
def test_whatever_a_stranger_sends_the_group_gathers(place: Place, sent: bytes) -> None:
    gathering = Soon(lambda: place.gather())
    for way in (lambda sock: sock, lambda sock: inside(place, sock)):
        with (
            place.knock() as plain,
            contextlib.suppress(OSError),
            way(plain) as sock,
        ):
            sock.sendall(sent)
            if len(sent) >= HELLO:  # at once: no more is waited for
                sock.settimeout(5)
                assert hung_up(sock)
    assert place.join().run_id == gathering.get().run_id


@pytest.mark.parametrize("sent", NONSENSE)
def test_whatever_a_stranger_sends_the_group_lives_and_the_door_stays_watched(
    place: Place, sent: bytes
) -> None:
    made = group(place, 2)
    with place.knock() as plain, contextlib.suppress(OSError):
        with inside(place, plain) as sock:
            sock.sendall(sent)
    made.hub.broadcast({"number": 1}, {})
    assert made.ears[0].messages.get(timeout=5) == (0, {"number": 1}, b"")
    assert made.ear.lost.empty()
    with pytest.raises(LinkClosed):
        place.join()
    assert "rank 1 has restarted" in str(made.ear.lost.get(timeout=5))
    made.hub.close()


CHUNKS = st.lists(
    st.one_of(
        st.binary(max_size=200),
        st.just(Hello(1, b"n" * NONCE).pack()),
        st.builds(lambda rank: Hello(rank, b"n" * NONCE).pack(), st.integers(0, 2**32 - 1)),
        st.builds(lambda version: struct.pack("!8sHI32s", b"mLoRA-lk", version, 1, b""), st.integers(0, 2**16 - 1)),
        st.just(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),  # how TLS begins
    ),
    max_size=5,
)  # fmt: skip


@settings(max_examples=stories(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(strangers=st.lists(st.tuples(CHUNKS, st.booleans()), min_size=1, max_size=4), encrypted=st.booleans())
def test_no_bytes_end_or_delay_the_gathering(
    tmp_path_factory: pytest.TempPathFactory, strangers: list[tuple[list[bytes], bool]], encrypted: bool
) -> None:
    place = Place(put(tmp_path_factory.getbasetemp() / "fuzzed", pair()) if encrypted else None)
    gathering = Soon(lambda: place.gather())
    with contextlib.ExitStack() as stack:
        for chunks, stays in strangers:
            sock = stack.enter_context(place.knock())
            with contextlib.suppress(ConnectionError):
                for chunk in chunks:
                    sock.sendall(chunk)
            if not stays:
                sock.close()
        began = time.monotonic()
        spoke = place.join(timeout=8)
        hub = gathering.get()
        assert time.monotonic() - began < 8  # less than the time that one who stays silent has
    assert hub.run_id == spoke.run_id
    spoke.close()
    hub.close()


def test_a_byte_a_second_holds_the_door_for_nobody(place: Place) -> None:
    gathering = Soon(lambda: place.gather())
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(place.knock()) for _ in range(20)]
        done = threading.Event()

        def drip() -> None:
            while not done.wait(0.05):
                for sock in slow:
                    with contextlib.suppress(OSError):
                        sock.send(b"m")

        threading.Thread(target=drip, daemon=True).start()
        began = time.monotonic()
        assert place.join().run_id == "run-1"
        assert time.monotonic() - began < 5
        gathering.get()
        done.set()


def test_a_thousand_calls_that_say_nothing_hold_the_door_for_nobody(place: Place) -> None:
    """In plain, so that there are as many at once as a process may have; whatever has been there longest has to go."""
    gathering = Soon(lambda: place.gather())
    with contextlib.ExitStack() as stack:
        for _ in range(1000):
            stack.enter_context(place.knock())
        began = time.monotonic()
        assert place.join().run_id == "run-1"
        assert time.monotonic() - began < 5
    gathering.get()


def test_calls_that_never_end_hold_the_door_for_nobody(place: Place) -> None:
    """New strangers come all the time, faster than anybody's time is over."""
    gathering, done = Soon(lambda: place.gather()), threading.Event()
    place.knock().close()

    def flood() -> None:
        held: list[socket.socket] = []
        while not done.is_set():
            with contextlib.suppress(OSError, AssertionError):
                held.append(place.knock())
            if len(held) > 500:
                held.pop(0).close()
        for sock in held:
            sock.close()

    floods = [threading.Thread(target=flood, daemon=True) for _ in range(2)]
    for one in floods:
        one.start()
    began = time.monotonic()
    try:
        assert place.join(timeout=30).run_id == "run-1"
    finally:
        done.set()
    assert time.monotonic() - began < 20
    gathering.get().close()
    for one in floods:  # the next tests count descriptors
        one.join(10)


# --- the door by itself, with a clock of the test's own -----------------------------------------------------------------


class Clock:
    """Goes on a little each time it is looked at."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 0.0001
        return self.now


def a_door(place: Place, clock: Clock, most: int = 4) -> Door:
    membership, run = place.membership(2), digest_of("run-1")

    def let_in(sock: socket.socket) -> Words:
        return welcome(sock, membership, run, place.server, os.urandom)

    return Door(listen(place.host, place.port), let_in, clock=clock, patience=10, most=most)


def looked_at(door: Door, clock: Clock) -> None:
    """Whatever has come by now."""
    for _ in range(5):
        time.sleep(0.01)
        with contextlib.suppress(TimeoutError):
            door.next(clock.now + 0.0005)


def test_time_does_not_begin_anew_with_each_byte() -> None:
    clock, place = Clock(), Place()
    door = a_door(place, clock)
    with place.knock() as sock:
        for _ in range(9):
            sock.send(b"m")
            looked_at(door, clock)
            assert door.callers == 1
            clock.now += 1.0
        clock.now += 1.0
        looked_at(door, clock)
        assert door.callers == 0
        assert "did not authenticate within 10 s" in door.complaint
        assert hung_up(sock)
    door.leave()


def test_whoever_has_one_address_pushes_out_only_its_own_calls() -> None:
    clock, place = Clock(), Place()
    door = a_door(place, clock)
    with contextlib.ExitStack() as stack:
        honest = stack.enter_context(place.knock("127.0.0.9"))
        looked_at(door, clock)
        for _ in range(20):
            stack.enter_context(place.knock("127.0.0.2"))
            looked_at(door, clock)
        assert door.callers == 4
        assert "from 127.0.0.2" in door.complaint
        answering = Soon(lambda: door.next(clock.now + 5))
        words = call(honest, place.membership(2), 1, None, os.urandom)
        assert _drive(words, honest.fileno(), time.monotonic() + 10).rank == 1
        assert answering.get().rank == 1
    door.leave()


def test_a_process_without_descriptors_goes_on_when_it_has_some_again() -> None:
    clock, place = Clock(), Place()
    door = a_door(place, clock, most=64)
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(place.knock())
        looked_at(door, clock)
        assert door.callers == 3
        stack.enter_context(place.knock())
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest_free = os.dup(0)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
        try:
            looked_at(door, clock)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert door.turned_away > 0
        looked_at(door, clock)
        assert door.callers >= 1
    door.leave()


# --- whoever answers in rank 0's place, or stands in between ------------------------------------------------------------


def test_who_answers_for_rank_0_without_the_token_learns_nothing(place: Place) -> None:
    """Neither the token, nor a proof that could be used elsewhere, nor anything that comes after."""
    heard: list[bytes] = []
    server = place.server

    def impostor(listener: socket.socket) -> None:
        sock, _ = listener.accept()
        if server is not None:
            sock = server.wrap_socket(sock, server_side=True)
        heard.append(sock.recv(1000))
        sock.sendall(os.urandom(96))
        heard.append(sock.recv(1000))
        sock.close()

    with socket.create_server((place.host, place.port)) as listener:
        Soon(lambda: impostor(listener))
        joining = Soon(lambda: place.join(timeout=30))
        time.sleep(0.5)
    hub = place.gather()
    assert joining.get().run_id == hub.run_id
    assert len(heard[0]) == HELLO
    assert heard[1:] == [b""]


def test_a_call_that_was_overheard_opens_no_door_a_second_time() -> None:
    place, said = Place(), []
    gathering = Soon(lambda: place.gather())
    with place.knock() as sock:

        class Overheard:
            def send(self, words: bytes) -> int:
                said.append(words)
                return sock.send(words)

            def recv(self, length: int) -> bytes:
                return sock.recv(length)

        sock.setblocking(False)
        words = call(Overheard(), place.membership(2), 1, None, os.urandom)  # type: ignore[arg-type]
        _drive(words, sock.fileno(), time.monotonic() + 5)
        hub, ear = gathering.get(), Ear()
        hub.start(ear.hear, ear.lost.put)
        with place.knock() as again:
            again.sendall(b"".join(said))
            again.settimeout(5)
            assert hung_up(again)
        time.sleep(0.3)
        assert ear.lost.empty()
    hub.close()


def test_a_stranger_who_speaks_an_older_tls_is_turned_away(tmp_path: Path) -> None:
    place = Place(put(tmp_path / "tls", pair()))
    gathering = Soon(lambda: place.gather())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with place.knock() as sock:
        words = call(context.wrap_socket(sock), place.membership(2), 1, None, os.urandom)
        with pytest.raises((Unproven, ssl.SSLError, ConnectionError)):
            _drive(words, sock.fileno(), time.monotonic() + 5)
    assert place.join().run_id == gathering.get().run_id


def test_frames_go_through_a_channel_as_through_a_socket() -> None:
    near, far = socket.socketpair()
    channel, payload = Channel(near), os.urandom(3_000_000)
    sending = Soon(lambda: send_frame(channel, {"n": 1}, payload))
    assert receive_frame(far) == ({"n": 1}, payload)
    sending.get()
    channel.settimeout(0.1)
    with pytest.raises(LinkClosed, match="no data within"):
        receive_frame(channel)
    channel.close()
    with pytest.raises(LinkClosed):
        send_frame(channel, {})
    with pytest.raises(LinkClosed):
        receive_frame(channel)
