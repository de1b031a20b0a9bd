"""Tensors of files under the names that the model has for them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from torch import Tensor


class TensorSource(Protocol):
    """Tensors of the checkpoint by name; each is read when asked for."""

    def names(self) -> Collection[str]: ...
    def tensor(self, name: str) -> Tensor: ...


class Renamed:
    """``in_model``: of a stored name that in the model; None leaves the tensor out."""

    def __init__(self, source: TensorSource, in_model: Callable[[str], str | None]) -> None:
        self._tensor: Callable[[str], Tensor] = source.tensor
        names = ((in_model(stored), stored) for stored in source.names())
        self._stored = {name: stored for name, stored in names if name is not None}

    def names(self) -> Collection[str]:
        return self._stored.keys()

    def tensor(self, name: str) -> Tensor:
        return self._tensor(self._stored[name])


def moved(former: str, root: str, stored: str) -> str:
    """``stored`` with ``root`` in the place of ``former``, if it begins so."""
    return root + stored.removeprefix(former) if stored.startswith(former) else stored
