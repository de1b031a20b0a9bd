"""Which tasks a reader asked for: those of a namespace, in a state, with some words. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mlora_operator.page.order import Standing


@dataclass(frozen=True, slots=True)
class Choice:
    """``words``: in lower case; a task has to have all of them in its namespace/name, base model, pipeline or reason."""

    namespace: str | None = None
    state: str | None = None
    words: tuple[str, ...] = ()

    def takes(self, one: Standing) -> bool:
        if self.namespace is not None and one.task.key.namespace != self.namespace:
            return False
        if self.state is not None and one.state != self.state:
            return False
        if not self.words:
            return True
        text = _searched(one)
        return all(word in text for word in self.words)


def chosen(standings: Iterable[Standing], choice: Choice) -> tuple[Standing, ...]:
    return tuple(one for one in standings if choice.takes(one))


def words_of(search: str) -> tuple[str, ...]:
    return tuple(search.lower().split())


def _searched(one: Standing) -> str:
    task, status = one.task, one.status
    model = task.spec.base_model if task.spec is not None else ""
    parts = (str(task.key), model, status.pipeline or "", status.reason or "")
    return " ".join(parts).lower()
