"""What the watches have brought, by kind and uid. Pure but for being changed.

kopf has indexes of its own. At the start it lets an object's handlers wait until all objects of all kinds are indexed, and
wakes all that wait with each one that is: with 2,000 tasks that took 23 seconds, with more the square of it. A dictionary
that the event handlers fill costs nothing. What of an object is kept is decided before it comes here (``kopf_reading``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

Raw = Mapping[str, Any]


class WatchedObjects:
    """Objects of some kinds, each named by its plural."""

    def __init__(self, plurals: Iterable[str]) -> None:
        self._objects: dict[str, dict[str, Raw]] = {plural: {} for plural in plurals}

    def saw(self, plural: str, event: str | None, body: Raw) -> None:
        """``event``: ADDED, MODIFIED or DELETED; None for an object of a first list. Those of one object come in their
        order. Raises KeyError for a kind that is not watched."""
        objects, uid = self._objects[plural], body["metadata"]["uid"]
        if event == "DELETED":
            objects.pop(uid, None)
        else:
            objects[uid] = dict(body)  # without kopf's views on it

    def of(self, plural: str) -> Callable[[], Iterable[Raw]]:
        """A view on one kind: all of its objects whenever it is asked."""
        objects = self._objects[plural]
        return lambda: list(objects.values())
