"""Hidden states and gradients between neighbouring stages, over torch.distributed.

Forward, s -> s+1: the hidden states [tokens, hidden]. Backward, s+1 -> s: their gradient of the same shape, and a small
float64 tensor [segments, 2] of (loss sum, squared gradient norm) that gathers on its way up. Each direction is a channel
of its own: first in, first out, one thread that sends and one that receives, so that communication overlaps with
computing and a slow neighbour blocks nobody but itself. gloo carries CPU tensors (CUDA tensors are staged through the
host), NCCL carries CUDA tensors, each thread on its own stream.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from mlora_worker.pipeline.frames import LinkClosed

Backend = Literal["gloo", "nccl"]

# A receive is posted as soon as the descriptor is here; the tensor follows when the neighbour has computed it.
_PATIENCE = timedelta(hours=6)


@dataclass(frozen=True, slots=True)
class Forwarded:
    number: int
    hidden: Tensor  # [tokens, hidden]


@dataclass(frozen=True, slots=True)
class Returned:
    number: int
    gradient: Tensor  # [tokens, hidden]
    stats: Tensor  # [segments, 2], float64, CPU


@dataclass(slots=True)
class _Channel:
    """One direction to or from one neighbour: a process group, and a queue that a thread works off."""

    group: dist.ProcessGroup
    jobs: queue.SimpleQueue[Callable[[], None]]


class Transport:
    """Talks to the neighbours of one rank. ``deliver_*`` are called by the receiving threads."""

    def __init__(
        self,
        *,
        rank: int,
        world: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        backend: Backend,
        deliver_forward: Callable[[Forwarded], None],
        deliver_backward: Callable[[Returned], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        self._rank, self._world = rank, world
        self._hidden, self._dtype, self._device = hidden_size, dtype, device
        self._staged = backend == "gloo"
        self._deliver_forward, self._deliver_backward = deliver_forward, deliver_backward
        self._on_error = on_error
        self.payload_bytes = 0  # hidden states and their gradients, sent by this rank
        self.stats_bytes = 0
        # Every rank must create all groups in the same order, also those it does not belong to.
        self._channels: dict[tuple[str, int], _Channel] = {}
        for stage in range(world - 1):
            for direction in ("forward", "backward"):
                group = dist.new_group([stage, stage + 1], timeout=_PATIENCE, backend=backend)
                if rank in (stage, stage + 1):
                    assert isinstance(group, dist.ProcessGroup)
                    self._channels[direction, stage] = self._open(group, f"{direction}-{stage}")

    def send_forward(self, hidden: Tensor) -> None:
        """Queue hidden states [tokens, hidden] for the next stage; returns at once."""
        ready = self._record()
        self._put(
            "forward", self._rank, lambda: self._send(hidden, "forward", self._rank, self._rank + 1, ready)
        )
        self.payload_bytes += hidden.numel() * hidden.element_size()

    def send_backward(self, gradient: Tensor, stats: Tensor) -> None:
        """Queue a gradient and its stats for the former stage; returns at once."""
        ready = self._record()
        stage = self._rank - 1

        def job() -> None:
            self._send(gradient, "backward", stage, stage, ready)
            self._send(stats.to(torch.float64), "backward", stage, stage, None)

        self._put("backward", stage, job)
        self.payload_bytes += gradient.numel() * gradient.element_size()
        self.stats_bytes += stats.numel() * 8

    def expect_forward(self, number: int, tokens: int) -> None:
        """Post the receive of a microbatch's hidden states from the former stage."""
        stage = self._rank - 1
        self._put(
            "forward",
            stage,
            lambda: self._deliver_forward(Forwarded(number, self._receive(tokens, "forward", stage, stage))),
        )

    def expect_backward(self, number: int, tokens: int, segments: int) -> None:
        """Post the receive of a microbatch's gradient from the next stage."""
        stage = self._rank

        def job() -> None:
            gradient = self._receive(tokens, "backward", stage, stage + 1)
            stats = torch.empty(
                segments, 2, dtype=torch.float64, device="cpu" if self._staged else self._device
            )
            dist.recv(stats, src=stage + 1, group=self._channels["backward", stage].group)
            self._deliver_backward(Returned(number, gradient, stats.cpu()))

        self._put("backward", stage, job)

    def _open(self, group: dist.ProcessGroup, name: str) -> _Channel:
        jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

        def work() -> None:
            stream: Any = None if self._staged else torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            while True:
                job = jobs.get()
                try:
                    with torch.cuda.stream(stream):
                        job()
                        if stream is not None:
                            stream.synchronize()  # this thread only; computing goes on in its own stream
                except Exception as error:  # the neighbour is gone or the network failed: the group is over
                    self._on_error(LinkClosed(f"channel {name} to a neighbour broke: {error}"))
                    return

        threading.Thread(target=work, name=name, daemon=True).start()
        return _Channel(group, jobs)

    def _put(self, direction: str, stage: int, job: Callable[[], None]) -> None:
        self._channels[direction, stage].jobs.put(job)

    def _record(self) -> torch.cuda.Event | None:
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _send(
        self, tensor: Tensor, direction: str, stage: int, peer: int, ready: torch.cuda.Event | None
    ) -> None:
        if ready is not None:
            ready.synchronize() if self._staged else torch.cuda.current_stream().wait_event(ready)
        tensor = tensor.contiguous().cpu() if self._staged else tensor.contiguous().to(self._device)
        dist.send(tensor, dst=peer, group=self._channels[direction, stage].group)

    def _receive(self, tokens: int, direction: str, stage: int, peer: int) -> Tensor:
        where = torch.device("cpu") if self._staged else self._device
        buffer = torch.empty(tokens, self._hidden, dtype=self._dtype, device=where)
        dist.recv(buffer, src=peer, group=self._channels[direction, stage].group)
        return buffer.to(self._device)


def rendezvous(host: str, port: int, rank: int, world: int, run_id: str, backend: Backend) -> None:
    """Join the process group of this run. The store is new with every run, and its keys carry the run id."""
    store = TCPStore(
        host, port, world, is_master=rank == 0, timeout=timedelta(seconds=120), wait_for_workers=False
    )
    dist.init_process_group(
        backend,
        store=PrefixStore(run_id, store),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=120),
    )
