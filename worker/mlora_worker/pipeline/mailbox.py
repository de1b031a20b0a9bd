"""What a rank does next: the backward whose gradient has arrived, else the next item in order, else it sleeps.

The one place where the threads of a rank meet. Nothing polls: whoever brings something wakes the loop.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mlora_worker.pipeline.transport import Forwarded, Returned
from mlora_worker.stream.items import Item, Train


@dataclass(frozen=True, slots=True)
class Entry:
    """An item that this rank may run now, with what it needs."""

    item: Item
    token_ids: Tensor | None = None  # [tokens], stage 0
    hidden: Tensor | None = None  # [tokens, hidden], stages > 0
    labels: Tensor | None = None  # [tokens], last stage; -100 where nothing is predicted


Supply = Callable[[], Entry | None]


class Mailbox:
    """Thread-safe. ``supply``, on rank 0, makes the next entry on demand; it is called with ``changed`` held."""

    def __init__(self, changed: threading.Condition, supply: Supply | None = None) -> None:
        self.changed = changed
        self._supply = supply
        self._items: deque[tuple[Item, Tensor | None]] = deque()
        self._forwarded: deque[Forwarded] = deque()
        self._returned: deque[Returned] = deque()
        self._error: Exception | None = None

    def put_item(self, item: Item, labels: bytes) -> None:
        tensor = torch.frombuffer(bytearray(labels), dtype=torch.int64) if labels else None
        with self.changed:
            self._items.append((item, tensor))
            self.changed.notify_all()

    def put_forward(self, message: Forwarded) -> None:
        with self.changed:
            self._forwarded.append(message)
            self.changed.notify_all()

    def put_backward(self, message: Returned) -> None:
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

    def take(self) -> Returned | Entry:
        """Block until there is work. Raises what ``fail`` was told."""
        with self.changed:
            while True:
                if self._error is not None:
                    raise self._error
                if self._returned:
                    return self._returned.popleft()
                entry = self._supply() if self._supply else self._next_in_order()
                if entry is not None:
                    return entry
                self.changed.wait()

    def _next_in_order(self) -> Entry | None:
        if not self._items:
            return None
        item, labels = self._items[0]
        if not isinstance(item, Train):
            self._items.popleft()
            return Entry(item)
        if not self._forwarded:
            return None
        self._items.popleft()
        message = self._forwarded.popleft()
        if message.number != item.number:
            raise RuntimeError(
                f"item {item.number} met the hidden states of {message.number}: the stream is out of order"
            )
        return Entry(item, hidden=message.hidden, labels=labels)
