"""Which tasks a reader asked for: those of a namespace, in a state, with some words. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mlora_operator.page.order import Lists, Standing


@dataclass(frozen=True, slots=True)
class Choice:
    """``words``: in lower case; a task has to have all of them in what is searched."""

    namespace: str | None = None
    state: str | None = None
    words: tuple[str, ...] = ()

    def takes(self, one: Standing, lists: Lists) -> bool:
        if self.namespace is not None and one.task.key.namespace != self.namespace:
            return False
        if self.state is not None and one.state != self.state:
            return False
        if not self.words:  # texts of thousands are made only once somebody searches
            return True
        text = lists.texts[one.task.uid]
        return all(word in text for word in self.words)


def chosen(lists: Lists, standings: Iterable[Standing], choice: Choice) -> tuple[Standing, ...]:
    """Of ``standings``, which are some of ``lists``."""
    return tuple(one for one in standings if choice.takes(one, lists))


def words_of(search: str) -> tuple[str, ...]:
    return tuple(search.lower().split())
