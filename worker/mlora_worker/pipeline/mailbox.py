"""What a rank does next: the backward whose gradient has arrived, else the next item in order, else it sleeps.

``stream/turns.py`` makes it wait a moment for a gradient before another forward, where that pays. The one place where the
threads of a rank meet. Nothing polls: whoever brings something wakes the loop.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mlora_worker.pipeline.frames import Payload
from mlora_worker.pipeline.transport import BackwardMessage, ForwardMessage
from mlora_worker.storage.artifacts.aside import tensors_in
from mlora_worker.stream.items import Evaluate, Item, Load, Train
from mlora_worker.stream.turns import Turns


@dataclass(frozen=True, slots=True)
class Entry:
    """An item that this rank may run now, with what it needs."""

    item: Item
    token_ids: Tensor | None = None  # [tokens], stage 0
    hidden: Tensor | None = None  # [tokens, width], stages > 0
    labels: Tensor | None = None  # [tokens], last stage; -100 where nothing is predicted
    state: Mapping[str, Tensor] | None = (
        None  # with a Load that takes a task up: this stage's part of its state
    )


Supply = Callable[[], Entry | None]


class Mailbox:
    """Thread-safe. ``supply``, on rank 0, makes the next entry on demand; it is called with ``changed`` held.

    ``turns`` is None on the last stage, which turns round at once and has nothing to wait for.
    """

    def __init__(
        self,
        changed: threading.Condition,
        supply: Supply | None = None,
        turns: Turns | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.changed = changed
        self._supply = supply
        self._turns = turns
        self._clock = clock
        self._handed_out: float | None = None  # when the forward or backward that the loop does now began
        self._items: deque[Entry] = deque()
        self._forwarded: deque[ForwardMessage] = deque()
        self._returned: deque[BackwardMessage] = deque()
        self._error: Exception | None = None

    def put_item(self, item: Item, payload: Payload) -> None:
        """``payload``: labels as int64, for the last stage; a Load's state as safetensors."""
        labels = state = None
        if payload and isinstance(item, Load):
            state = tensors_in(payload)
        elif payload:
            labels = torch.frombuffer(bytearray(payload), dtype=torch.int64)
        with self.changed:
            self._items.append(Entry(item, labels=labels, state=state))
            self.changed.notify_all()

    def put_forward(self, message: ForwardMessage) -> None:
        with self.changed:
            self._forwarded.append(message)
            self.changed.notify_all()

    def put_backward(self, message: BackwardMessage) -> None:
        with self.changed:
            self._returned.append(message)
            self.changed.notify_all()

    def fail(self, error: Exception) -> None:
        """End the loop: ``take`` raises ``error``."""
        with self.changed:
            self._error = self._error or error
            self.changed.notify_all()

    @property
    def failed(self) -> bool:
        return self._error is not None

    def take(self) -> BackwardMessage | Entry:
        """Block until there is work. Raises what ``fail`` was told."""
        with self.changed:
            until = self._no_forward_before()
            while True:
                if self._error is not None:
                    raise self._error
                if self._returned:
                    self._begin(forward=False)
                    return self._returned.popleft()
                left = until - self._clock() if until is not None else 0.0
                if left > 0:
                    self.changed.wait(left)
                    continue
                entry = self._supply() if self._supply else self._next_in_order()
                if entry is not None:
                    if isinstance(entry.item, Train):
                        self._begin(forward=True)
                    return entry
                self.changed.wait()

    def _no_forward_before(self) -> float | None:
        if self._turns is None:
            return None
        now = self._clock()
        if self._handed_out is not None:
            self._turns.took(now - self._handed_out)
            self._handed_out = None
        return now + self._turns.wait if self._turns.wait else None

    def _begin(self, *, forward: bool) -> None:
        if self._turns is None:
            return
        self._handed_out = self._clock()
        if forward:
            self._turns.forward()
        else:
            self._turns.backward()

    def _next_in_order(self) -> Entry | None:
        if not self._items:
            return None
        entry = self._items[0]
        item = entry.item
        if not isinstance(item, Train | Evaluate):
            return self._items.popleft()
        if not self._forwarded:
            return None
        self._items.popleft()
        message = self._forwarded.popleft()
        if message.number != item.number:
            raise RuntimeError(
                f"item {item.number} met the hidden states of {message.number}: the stream is out of order"
            )
        return replace(entry, hidden=message.hidden)
