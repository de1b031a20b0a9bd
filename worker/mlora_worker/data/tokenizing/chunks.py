"""Items taken together, until they are many or large. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def batches(items: Iterable[T], *, most: int, size: Callable[[T], int], most_size: int) -> Iterator[list[T]]:
    """In their order. A batch ends with the item that makes it ``most`` items, or at least ``most_size`` large together."""
    batch: list[T] = []
    total = 0
    for item in items:
        batch.append(item)
        total += size(item)
        if len(batch) == most or total >= most_size:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch
