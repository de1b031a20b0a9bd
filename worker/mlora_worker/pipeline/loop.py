"""The loop of one rank: takes what the mailbox gives, computes, passes on. It reads from top to bottom; nothing is hidden.

Every rank runs the same loop. What differs is told by ``Neighbours``: the first stage hands finished microbatches to the
coordinator instead of a former stage, the last one turns round from forward to backward at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from mlora_worker.pipeline.engine import StageEngine
from mlora_worker.pipeline.mailbox import Entry, Mailbox
from mlora_worker.pipeline.transport import Returned
from mlora_worker.stream.items import Load, Save, Stop, Train, Unload


class Neighbours(Protocol):
    """Where results go. ``Transport`` sends them to other ranks."""

    def send_forward(self, hidden: Tensor) -> None: ...
    def send_backward(self, gradient: Tensor, stats: Tensor) -> None: ...


OnReturned = Callable[
    [int, Tensor], None
]  # rank 0: number, stats [segments, 2] of (loss sum, squared gradient norm)
OnExported = Callable[[str, dict[str, Tensor]], None]  # task, this stage's part of the adapter on the CPU


class StageLoop:
    def __init__(
        self,
        *,
        first: bool,
        last: bool,
        engine: StageEngine,
        mailbox: Mailbox,
        neighbours: Neighbours,
        on_returned: OnReturned,
        on_exported: OnExported,
    ) -> None:
        self._first, self._last = first, last
        self._engine, self._mailbox, self._neighbours = engine, mailbox, neighbours
        self._on_returned, self._on_exported = on_returned, on_exported

    def run(self) -> None:
        """Work until ``Stop``. Raises what ended the group otherwise."""
        while True:
            work = self._mailbox.take()
            if isinstance(work, Returned):
                self._backward(work.number, work.gradient, work.stats)
                continue
            item = work.item
            match item:
                case Train():
                    self._forward(item, work)
                case Load():
                    self._engine.load(item)
                case Save():
                    if item.update is not None:
                        self._engine.apply(item.task, item.update)
                    self._on_exported(item.task, self._engine.export(item.task))
                case Unload():
                    self._engine.unload(item.task)
                case Stop():
                    return

    def _forward(self, item: Train, entry: Entry) -> None:
        out = self._engine.forward(item, token_ids=entry.token_ids, hidden=entry.hidden, labels=entry.labels)
        if not self._last:
            assert out.hidden is not None
            self._neighbours.send_forward(out.hidden)
            return
        assert out.losses is not None
        stats = torch.zeros(len(item.segments), 2, dtype=torch.float64)
        stats[:, 0] = out.losses.to(stats)
        self._backward(item.number, None, stats)

    def _backward(self, number: int, gradient: Tensor | None, stats: Tensor) -> None:
        out = self._engine.backward(number, gradient)
        stats[:, 1] += out.squared_norms.to(stats)
        if self._first:
            self._on_returned(number, stats)
        else:
            assert out.gradient is not None
            self._neighbours.send_backward(out.gradient, stats)
