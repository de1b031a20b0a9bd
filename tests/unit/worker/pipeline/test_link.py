"""The links are the group: what travels, how everybody learns that somebody is gone, and what is renewed meanwhile."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from pathlib import Path

import pytest

from mlora_worker.pipeline.frames import LinkClosed
from mlora_worker.pipeline.proof import HELLO

from .links import HOST, TOKEN, Ear, Place, Soon, group, hung_up, pair, put


@pytest.fixture(params=["plain", "tls"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return Place(put(tmp_path / "tls", pair()) if request.param == "tls" else None)


def test_every_rank_learns_the_run_and_descriptors_reach_all_but_payloads_only_their_own(
    place: Place,
) -> None:
    made = group(place, 3)
    assert {spoke.run_id for spoke in made.spokes} == {"run-1"}
    made.hub.broadcast({"number": 1}, {2: b"labels"})
    assert made.ears[0].messages.get(timeout=5) == (0, {"number": 1}, b"")
    assert made.ears[1].messages.get(timeout=5) == (0, {"number": 1}, b"labels")
    made.spokes[1].send({"kind": "adapter"}, b"x" * 5_000_000)
    assert made.ear.messages.get(timeout=5) == (2, {"kind": "adapter"}, b"x" * 5_000_000)
    made.hub.close()


def test_both_ends_may_send_much_at_the_same_time(place: Place) -> None:
    """Neither reads on while it waits for room to write, if one lock held both up."""
    made, payload = group(place, 2), bytes(range(256)) * 40_000
    rounds = 5
    sending = [
        Soon(lambda: [made.hub.broadcast({"n": n}, {1: payload}) for n in range(rounds)]),
        Soon(lambda: [made.spokes[0].send({"n": n}, payload) for n in range(rounds)]),
    ]
    for n in range(rounds):
        assert made.ear.messages.get(timeout=30) == (1, {"n": n}, payload)
        assert made.ears[0].messages.get(timeout=30) == (0, {"n": n}, payload)
    for one in sending:
        one.get()
    made.hub.close()


def test_a_rank_that_dies_is_noticed_by_rank_0_and_rank_0s_end_by_all(place: Place) -> None:
    made = group(place, 3)
    made.spokes[0].close()
    assert isinstance(made.ear.lost.get(timeout=5), LinkClosed)
    made.hub.close()
    assert isinstance(made.ears[1].lost.get(timeout=5), LinkClosed)


def test_a_rank_that_starts_again_ends_the_group(place: Place) -> None:
    made = group(place, 2)
    with pytest.raises(LinkClosed):
        place.join()
    assert "rank 1 has restarted" in str(made.ear.lost.get(timeout=5))
    made.hub.close()


def test_a_rank_that_restarts_while_others_are_missed_takes_its_former_place(place: Place) -> None:
    gathering = Soon(lambda: place.gather(3))
    former = Soon(lambda: place.join(1, 3))
    time.sleep(0.3)
    newer = Soon(lambda: place.join(1, 3))
    with pytest.raises(LinkClosed):
        former.get()
    last = Soon(lambda: place.join(2, 3))
    hub = gathering.get()
    assert newer.get().run_id == last.get().run_id == "run-1"
    hub.close()


def test_missing_ranks_are_named_and_how_many_calls_were_turned_away(place: Place) -> None:
    gathering = Soon(lambda: place.gather(3, timeout=4.0))
    with place.knock() as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
        assert hung_up(sock)
    with pytest.raises(
        TimeoutError, match=r"ranks \[1, 2\] .*; 1 connections were rejected, the last one because"
    ):
        gathering.get()


def test_a_message_that_cannot_be_handled_ends_the_group(place: Place) -> None:
    made = group(place, 2, hear=lambda *_: 1 / 0)
    made.spokes[0].send({"kind": "nonsense"})
    assert "could not be handled" in str(made.ear.lost.get(timeout=5))
    made.hub.close()


def test_a_pipeline_of_one_rank_listens_to_nobody(place: Place) -> None:
    hub = place.gather(1)
    hub.start(Ear().hear, Ear().lost.put)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((place.host, place.port), timeout=5)


@pytest.mark.parametrize("host", ["::1", "127.0.0.1", "localhost"])
def test_links_work_by_either_family_of_addresses(host: str) -> None:
    made = group(Place(host=host), 2)
    made.hub.broadcast({"number": 1}, {})
    assert made.ears[0].messages.get(timeout=5) == (0, {"number": 1}, b"")
    made.hub.close()


@pytest.mark.parametrize("caller", ["::1", "127.0.0.1"])
def test_rank_0_of_a_pod_listens_by_both_families(caller: str) -> None:
    place = Place(host=caller)
    gathering = Soon(lambda: Place.gather(_everywhere(place)))
    spoke = place.join()
    assert spoke.run_id == gathering.get().run_id


def _everywhere(place: Place) -> Place:
    other = Place()
    other.host, other.port = "", place.port
    return other


def test_a_token_that_is_renewed_while_ranks_wait_for_each_other_counts_at_once(place: Place) -> None:
    """The kubelets of two nodes bring it at different times, and the operator has long forgotten the former one."""
    held, read = {0: "old", 1: "old", 2: "old"}, threading.Event()

    def token(rank: int) -> str:
        if rank == 0:
            read.set()
        return held[rank]

    ranks = [Place(place.folder, token=lambda rank=rank: token(rank)) for rank in range(3)]
    for one in ranks:
        one.port = place.port
    gathering = Soon(lambda: ranks[0].gather(3))
    first = Soon(lambda: ranks[1].join(1, 3))
    assert read.wait(10)
    time.sleep(0.5)  # rank 1 is in by the former token
    held[0] = held[1] = "new"
    last = Soon(lambda: ranks[2].join(2, 3))  # has not got it yet: it calls until it has
    time.sleep(0.3)
    held[2] = "new"
    hub = gathering.get()
    assert first.get().run_id == last.get().run_id == "run-1"
    hub.close()


def test_a_certificate_that_is_renewed_while_ranks_wait_for_each_other_counts_at_once(tmp_path: Path) -> None:
    ranks = [Place(put(tmp_path / f"rank-{rank}", pair())) for rank in range(2)]
    ranks[1].port = ranks[0].port
    gathering = Soon(lambda: ranks[0].gather())
    with ranks[0].knock():
        assert ranks[0].folder is not None
        assert ranks[1].folder is not None
        put(ranks[0].folder, pair(1))
        joining = Soon(lambda: ranks[1].join())
        time.sleep(0.5)
        put(ranks[1].folder, pair(1))
        assert joining.get().run_id == gathering.get().run_id


WHY_NOT = {
    "another token": "has another token than this rank",
    "another certificate": "has another certificate than this pipeline: self-signed certificate",
    "a certificate of another name": "has another certificate than this pipeline: Hostname mismatch",
    "no encryption": "the TLS handshake with the peer failed",
    "no token": "token is empty",
}


def never_through(folder: Path, story: str) -> tuple[Exception, Exception]:
    """The errors of a rank that never gets through, and of rank 0, which misses it."""
    folder.mkdir()
    here, there = Place(put(folder / "here", pair())), Place(put(folder / "there", pair()))
    there.port = here.port
    match story:
        case "another token":
            there.token = lambda: "other"
        case "another certificate":
            put(folder / "there", pair(1))
        case "a certificate of another name":
            for place in ("here", "there"):
                put(folder / place, pair(0, "another.svc"))
        case "no encryption":
            here.folder = None
        case _:
            there.token = lambda: ""
    gathering = Soon(lambda: here.gather(timeout=4))
    here.knock().close()
    with pytest.raises(TimeoutError) as called:
        there.join(timeout=2)
    with pytest.raises(TimeoutError) as missed:
        gathering.get()
    return called.value, missed.value


def stood_between(folder: Path) -> list[bytes]:
    """What passed through somebody with the certificate but not the token, who hands on each end's words unchanged, from
    one TLS connection to another."""
    place = Place(put(folder, pair()))
    gathering = Soon(lambda: place.gather(timeout=4))
    passed: list[bytes] = []
    server, trust = place.server, place.trust
    assert server is not None
    assert trust is not None

    def between(listener: socket.socket) -> None:
        while True:
            near = server.wrap_socket(listener.accept()[0], server_side=True)
            far = trust.context().wrap_socket(place.knock(), server_hostname=HOST)
            with near, far, contextlib.suppress(OSError):
                for one, other in ((near, far), (far, near), (near, far), (far, near)):
                    passed.append(one.recv(1000))
                    other.sendall(passed[-1])

    with socket.create_server(("127.0.0.1", 0)) as listener:
        Soon(lambda: between(listener))
        near = Place(place.folder)
        near.port = listener.getsockname()[1]
        with pytest.raises(TimeoutError, match="has another token than this rank"):
            near.join(timeout=2)
    with pytest.raises(TimeoutError, match=r"ranks \[1\] did not connect"):
        gathering.get()
    return passed


@pytest.fixture(scope="module", autouse=True)
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Soon]:
    """All stories at the same time, beside the other tests of this file, since in each of them ranks wait as long as they
    may."""
    folder = tmp_path_factory.mktemp("never")
    for certificate in ((), (1,), (0, "another.svc")):
        pair(*certificate)  # once for all threads
    return {
        "between": Soon(lambda: stood_between(folder / "between")),
        **{
            story: Soon(lambda story=story, number=number: never_through(folder / str(number), story))
            for number, story in enumerate(WHY_NOT)
        },
    }


@pytest.mark.parametrize(
    "error", [FileNotFoundError("no token yet"), UnicodeDecodeError("utf-8", b"", 0, 1, "")]
)
@pytest.mark.parametrize("end", ["rank 0", "rank 1"])
def test_a_token_file_that_cannot_be_read_for_a_while_ends_nothing(end: str, error: Exception) -> None:
    there = threading.Event()

    def read() -> str:
        if not there.is_set():
            raise error
        return TOKEN

    place, other = Place(token=read), Place()
    other.port = place.port
    here, caller = (place, other) if end == "rank 0" else (other, place)
    gathering, joining = Soon(lambda: here.gather()), Soon(lambda: caller.join())
    time.sleep(0.3)
    there.set()
    assert joining.get().run_id == gathering.get().run_id


def test_what_is_sent_is_encrypted(tmp_path: Path) -> None:
    """A listener between the two sees neither run nor payload."""
    seen = bytearray()
    for folder, shown in ((None, True), (put(tmp_path / "tls", pair()), False)):
        seen.clear()
        place = Place(folder)
        gathering = Soon(lambda place=place: place.gather(run="the-name-of-the-run"))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            Soon(lambda listener=listener, place=place: _tap(listener, place, seen))
            near = Place(folder)
            near.port = port
            spoke = near.join()
            gathering.get()
            spoke.send({"kind": "adapter"}, b"weights of a task")
            time.sleep(0.2)
        assert (b"the-name-of-the-run" in seen, b"weights of a task" in seen) == (shown, shown)
        assert TOKEN.encode() not in seen
    assert HOST.encode() in seen  # the name of whom it asks for is not


def _tap(listener: socket.socket, place: Place, seen: bytearray) -> None:
    near, _ = listener.accept()
    far = place.knock()

    def carry(one: socket.socket, other: socket.socket) -> None:
        while data := one.recv(65536):
            seen.extend(data)
            other.sendall(data)

    Soon(lambda: carry(near, far))
    carry(far, near)


@pytest.mark.parametrize("story", WHY_NOT)
def test_a_rank_that_never_gets_through_says_why(ended: dict[str, Soon], story: str) -> None:
    called, missed = ended[story].get(30)
    assert re.search(rf"rank 0 at .* did not answer within 2 s: .*{WHY_NOT[story]}", str(called))
    assert "ranks [1]" in str(missed)


def test_who_has_the_certificate_but_not_the_token_cannot_stand_in_between(ended: dict[str, Soon]) -> None:
    passed = ended["between"].get(30)
    assert len(passed[0]) == HELLO
