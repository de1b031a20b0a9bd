"""Operators of torch, counted below autograd."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class CountOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts by name what is dispatched on this thread: on the CPU, backward runs on it, too."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.note(func)
        return func(*args, **(kwargs or {}))

    def note(self, func: Any) -> None:
        self.seen[str(func)] += 1
