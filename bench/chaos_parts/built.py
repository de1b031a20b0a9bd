"""What is built up step by step, and taken down again whatever happens."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Self


class Built:
    """A context manager. ``_build`` puts onto ``_stack`` what has to be taken down, also when it fails half way."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        try:
            self._build()
        except BaseException:
            self._stack.close()
            raise
        return self

    def _build(self) -> None:
        raise NotImplementedError

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
