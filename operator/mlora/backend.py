"""What a client needs of the place where tasks train."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from mlora_operator.cli.logs.story import StoryLine
from mlora_operator.download import Access

JSON = Mapping[str, Any]
Seen = Callable[[JSON], None]  # of a task as kubectl would show it, whenever it has changed


class Backend(Protocol):
    """All methods raise CommandError, and DownloadError where a store is asked."""

    def submit(self, texts: Sequence[tuple[str, str]], *, replace: bool) -> list[str]:
        """Manifests by name and content. Returns the names of the tasks in them."""

    def wait(self, names: Sequence[str], seconds: float | None, seen: Seen) -> None:
        """Until each task has ended, however. Raises CommandError where one did not succeed."""

    def tasks(self, labels: str | None) -> list[JSON]: ...

    def task(self, name: str) -> JSON: ...

    def story(self, name: str) -> list[StoryLine]: ...

    def adapter(self, name: str) -> tuple[str, Access, str]:
        """Address, access and uid of a finished adapter."""

    def delete(self, names: Sequence[str]) -> None: ...
