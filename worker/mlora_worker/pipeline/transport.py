"""Hidden states and gradients between neighbouring stages, over torch.distributed.

Forward, s -> s+1: the hidden states [tokens, width], with what else later layers need (``model/borders.py``). Backward, s+1
-> s: the gradient of what has one, mostly of all of it, and a small float64 tensor [segments, STATS] of (loss sum, squared
gradient norm, faults, ...) that gathers on its way up. Each direction is a channel of its own: first in, first out, one
thread that sends and one that receives, so that communication overlaps with computing and a slow neighbour blocks nobody
but itself. What belongs to one message is handed to the backend at once, and waited for together: one after the other, the
second would start when a thread has woken up on either side.

gloo carries CPU tensors (CUDA tensors are staged through the host), NCCL carries CUDA tensors, each thread on its own lane
(``lanes.py``).

A receive of NCCL that is posted early occupies the GPU until its tensor comes, and whatever waits for the whole GPU waits
for it: returning memory to the driver does, which a shortage of memory makes the allocator do. The tensor, in turn, may
depend on what this rank has not computed yet. So a byte over gloo, sent once a tensor is computed, goes before each of
NCCL's messages, and the receive is posted when it is here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from mlora_worker.model.objectives import REWARDS
from mlora_worker.pipeline.faults import is_out_of_memory
from mlora_worker.pipeline.frames import LinkClosed
from mlora_worker.pipeline.lanes import Lane, Moment, device_of
from mlora_worker.pipeline.listening import listen as listen_at

Backend = Literal["gloo", "nccl"]

# A receive waits from when the descriptor is here; the tensor follows when the neighbour has computed it.
_PATIENCE = timedelta(hours=6)

_PAUSE, _TRIES = 0.1, 300  # seconds between tries to get memory for what arrives, and how many

# Of a segment: loss sum, squared gradient norm, faults of the microbatch; then sums of a pair's rewards, where it has any.
STATS = 3 + REWARDS


@dataclass(frozen=True, slots=True)
class ForwardMessage:
    number: int
    hidden: Tensor  # [tokens, width]


@dataclass(frozen=True, slots=True)
class BackwardMessage:
    number: int
    gradient: Tensor  # [tokens, width]
    stats: Tensor  # [segments, STATS] float64, on the device


class Transport:
    """Talks to the neighbours of one rank. ``deliver_*`` are called by the receiving threads."""

    def __init__(
        self,
        *,
        rank: int,
        world: int,
        forward_width: int,
        backward_width: int,
        dtype: torch.dtype,
        device: torch.device,
        backend: Backend,
        deliver_forward: Callable[[ForwardMessage], None],
        deliver_backward: Callable[[BackwardMessage], None],
        on_error: Callable[[Exception], None],
        announced: bool | None = None,
    ) -> None:
        """``forward_width``: numbers of a token that come from the former stage; ``backward_width``: from the next one.
        ``announced``: a byte goes before each tensor; None: as the backend needs it."""
        self._rank, self._world = rank, world
        self._forward_width, self._backward_width = forward_width, backward_width
        self._dtype, self._device = dtype, device
        self._lanes, self._staged = device_of(device), backend == "gloo"
        self._deliver_forward, self._deliver_backward = deliver_forward, deliver_backward
        self._on_error = on_error
        self.payload_bytes = 0  # hidden states and their gradients, sent by this rank
        self.stats_bytes = 0
        # Every rank must create all groups in the same order, also those it does not belong to.
        self._channels: dict[tuple[str, int], SimpleQueue[_Job]] = {}
        announced = backend == "nccl" if announced is None else announced
        for stage in range(world - 1):
            for direction in ("forward", "backward"):
                ranks = [stage, stage + 1]
                wire = Wire(dist.new_group(ranks, timeout=_PATIENCE, backend=backend))
                word = Wire(dist.new_group(ranks, timeout=_PATIENCE, backend="gloo")) if announced else None
                if rank in ranks:
                    self._channels[direction, stage] = self._open(wire, word, f"{direction}-{stage}")

    def send_forward(self, hidden: Tensor) -> None:
        """Queue hidden states [tokens, width] for the next stage; returns at once."""
        ready, peer = self._lanes.mark(), self._rank + 1
        self._put("forward", self._rank, lambda line: line.send((hidden,), peer, ready))
        self.payload_bytes += hidden.numel() * hidden.element_size()

    def send_backward(self, gradient: Tensor, stats: Tensor) -> None:
        """Queue a gradient and its stats for the former stage; returns at once."""
        ready, peer = self._lanes.mark(), self._rank - 1
        self._put("backward", peer, lambda line: line.send((gradient, stats), peer, ready))
        self.payload_bytes += gradient.numel() * gradient.element_size()
        self.stats_bytes += stats.numel() * stats.element_size()

    def expect_forward(self, number: int, tokens: int) -> None:
        """Post the receive of a microbatch's hidden states from the former stage."""
        peer, expected = self._rank - 1, ((tokens, self._forward_width), self._dtype)

        def job(line: Line) -> None:
            self._deliver_forward(ForwardMessage(number, *line.receive((expected,), peer)))

        self._put("forward", peer, job)

    def expect_backward(self, number: int, tokens: int, segments: int) -> None:
        """Post the receive of a microbatch's gradient from the next stage."""
        peer = self._rank + 1
        expected = ((tokens, self._backward_width), self._dtype), ((segments, STATS), torch.float64)

        def job(line: Line) -> None:
            self._deliver_backward(BackwardMessage(number, *line.receive(expected, peer)))

        self._put("backward", self._rank, job)

    def _open(self, wire: Wire, word: Wire | None, name: str) -> SimpleQueue[_Job]:
        jobs: SimpleQueue[_Job] = SimpleQueue()

        def work() -> None:
            line = Line(wire, word, self._lanes.lane(), self._device, staged=self._staged)
            while True:
                job = jobs.get()
                try:
                    job(line)
                except Exception as error:  # the neighbour is gone or the network failed: the group is over
                    self._on_error(LinkClosed(f"channel {name} to a neighbour broke: {error}"))
                    return

        threading.Thread(target=work, name=name, daemon=True).start()
        return jobs

    def _put(self, direction: str, stage: int, job: _Job) -> None:
        self._channels[direction, stage].put(job)


Expected = tuple[tuple[int, ...], torch.dtype]  # shape and type of a tensor


@dataclass(frozen=True, slots=True)
class Wire:
    """Two ranks' process group. Both calls return when the backend has taken, or brought, all tensors."""

    group: Any  # dist.ProcessGroup; on ranks outside of it something else, never used

    def send(self, tensors: Sequence[Tensor], peer: int) -> None:
        _wait([dist.isend(one, dst=peer, group=self.group, tag=tag) for tag, one in enumerate(tensors)])

    def receive(self, buffers: Sequence[Tensor], peer: int) -> None:
        _wait([dist.irecv(one, src=peer, group=self.group, tag=tag) for tag, one in enumerate(buffers)])


def _wait(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        assert work is not None  # on ranks outside of the group, which ask for nothing
        work.wait()


@dataclass(frozen=True, slots=True)
class Line:
    """A channel as its thread sees it: both calls block this thread until all tensors of a message are out, or are here."""

    wire: Wire  # carries the tensors
    word: Wire | None  # over gloo, for the byte that goes ahead; None: none does
    lane: Lane
    device: torch.device
    staged: bool  # through the host's memory

    def send(self, tensors: Sequence[Tensor], peer: int, ready: Moment) -> None:
        if self.word is not None:
            self.lane.reach(ready)
            self.word.send((torch.ones(1, dtype=torch.uint8),), peer)
        if self.staged:
            self.wire.send([self.lane.to_host(one, ready).contiguous() for one in tensors], peer)
            return
        with self.lane.behind(ready):
            self.wire.send([one.contiguous() for one in tensors], peer)

    def receive(self, expected: Sequence[Expected], peer: int) -> list[Tensor]:
        if self.word is not None:
            self.word.receive((torch.empty(1, dtype=torch.uint8),), peer)
        if self.staged:
            pinned = self.device.type == "cuda"
            buffers = [
                patiently(lambda: torch.empty(shape, dtype=dtype, pin_memory=pinned))  # noqa: B023 - called at once
                for shape, dtype in expected
            ]
            self.wire.receive(buffers, peer)
        else:
            with self.lane.behind(None):
                buffers = [
                    patiently(lambda: torch.empty(shape, dtype=dtype, device=self.device))  # noqa: B023
                    for shape, dtype in expected
                ]
                self.wire.receive(buffers, peer)
        return [self.lane.hand_over(buffer) for buffer in buffers]


_Job = Callable[[Line], None]


def patiently(allocate: Callable[[], Tensor], pause: Callable[[float], None] = time.sleep) -> Tensor:
    """What ``allocate`` gives, tried again for a while when memory lacks: a microbatch that takes it all just now ends or
    fails, and gives it back. What arrives for the next one must not end the group meanwhile.
    """
    for _ in range(_TRIES):
        try:
            return allocate()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        pause(_PAUSE)
    return allocate()


def rendezvous(
    host: str, port: int, rank: int, world: int, run_id: str, backend: Backend, *, listen: str = ""
) -> None:
    """Join the process group of this run. The store is new with every run, and its keys carry the run id.

    ``listen``: the address on which rank 0 has the store; all of its addresses when empty.
    """
    door = listen_at(listen, port).detach() if rank == 0 and listen else None
    store = TCPStore(
        host,
        port,
        world,
        is_master=rank == 0,
        timeout=timedelta(seconds=120),
        wait_for_workers=False,
        master_listen_fd=door,
    )
    dist.init_process_group(
        backend,
        store=PrefixStore(run_id, store),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=120),
    )
