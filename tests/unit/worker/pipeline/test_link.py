"""The links are the group: who may join, what travels, and how everybody learns that somebody is gone."""

from __future__ import annotations

import queue
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from mlora_worker.pipeline.frames import LinkClosed, receive_frame, send_frame
from mlora_worker.pipeline.link import Hub, Spoke

TOKEN = "secret"


@dataclass
class Ear:
    messages: queue.Queue[Any] = field(default_factory=queue.Queue)
    lost: queue.Queue[LinkClosed] = field(default_factory=queue.Queue)

    def hear(self, rank: int, header: dict[str, Any], payload: bytes) -> None:
        self.messages.put((rank, header, payload))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def group(world: int, hear: Callable[..., Any] | None = None) -> tuple[Hub, Ear, list[Spoke], list[Ear], int]:
    port, hubs = free_port(), []
    thread = threading.Thread(
        target=lambda: hubs.append(Hub.gather(port, world, TOKEN, "run-1", host="127.0.0.1"))
    )
    thread.start()
    spokes: dict[int, Spoke] = {}
    joining = [
        threading.Thread(target=lambda r=rank: spokes.update({r: Spoke.join("127.0.0.1", port, r, TOKEN)}))
        for rank in range(1, world)
    ]
    for caller in joining:
        caller.start()
    for caller in (*joining, thread):
        caller.join(10)
    ear, ears = Ear(), [Ear() for _ in spokes]
    hubs[0].start(hear or ear.hear, ear.lost.put)
    for rank, own in zip(sorted(spokes), ears, strict=True):
        spokes[rank].start(own.hear, own.lost.put)
    return hubs[0], ear, [spokes[rank] for rank in sorted(spokes)], ears, port


def test_every_rank_learns_the_run_and_descriptors_reach_all_but_payloads_only_their_own() -> None:
    hub, ear, spokes, ears, _ = group(3)
    assert {spoke.run_id for spoke in spokes} == {"run-1"}
    hub.broadcast({"number": 1}, {2: b"labels"})
    assert ears[0].messages.get(timeout=5) == (0, {"number": 1}, b"")
    assert ears[1].messages.get(timeout=5) == (0, {"number": 1}, b"labels")
    spokes[1].send({"kind": "adapter"}, b"x" * 1_000_000)
    assert ear.messages.get(timeout=5) == (2, {"kind": "adapter"}, b"x" * 1_000_000)
    hub.close()


def test_a_rank_that_dies_is_noticed_by_rank_0_and_rank_0s_end_by_all() -> None:
    hub, ear, spokes, ears, _ = group(3)
    spokes[0]._sock.shutdown(socket.SHUT_RDWR)
    assert isinstance(ear.lost.get(timeout=5), LinkClosed)
    for sock in hub._peers.values():
        sock.shutdown(socket.SHUT_RDWR)
    assert isinstance(ears[1].lost.get(timeout=5), LinkClosed)
    hub.close()


def test_a_rank_that_starts_again_ends_the_group_but_a_stranger_does_not() -> None:
    hub, ear, _, _, port = group(2)
    for hello, ends in [
        ({"rank": 1, "token": "wrong", "version": 1}, False),
        ({"rank": 1, "token": TOKEN, "version": 1}, True),
    ]:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
            send_frame(sock, hello)
            with pytest.raises(LinkClosed):
                receive_frame(sock)
        if ends:
            assert "rank 1 has started again" in str(ear.lost.get(timeout=5))
        else:
            assert ear.lost.empty()
    hub.close()


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(struct.pack("!IQ", 3, 0) + b"[1]", id="no object"),
        pytest.param(struct.pack("!IQ", 60_000, 0) + b"[" * 60_000, id="deep JSON"),
        pytest.param(struct.pack("!IQ", 2, 2**28) + b"{}", id="a payload of 256 MiB"),
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", id="another protocol"),
    ],
)
def test_whatever_a_stranger_sends_the_group_lives_and_the_door_stays_watched(sent: bytes) -> None:
    hub, ear, _, _, port = group(2)
    with socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
        sock.sendall(sent)
        with pytest.raises(
            LinkClosed, match=r"closed the link|reset by peer"
        ):  # at once: no more is waited for
            receive_frame(sock)
    with socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
        send_frame(sock, {"rank": 1, "token": TOKEN, "version": 1})
        assert "rank 1 has started again" in str(ear.lost.get(timeout=5))
    hub.close()


def test_missing_ranks_are_named() -> None:
    with pytest.raises(TimeoutError, match=r"ranks \[1, 2\]"):
        Hub.gather(free_port(), 3, TOKEN, "run", host="127.0.0.1", timeout=0.2)


def test_a_message_that_cannot_be_handled_ends_the_group() -> None:
    hub, ear, spokes, _, _ = group(2, hear=lambda *_: 1 / 0)
    spokes[0].send({"kind": "nonsense"})
    assert "could not be handled" in str(ear.lost.get(timeout=5))
    hub.close()
