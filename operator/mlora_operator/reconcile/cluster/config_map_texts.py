"""Texts of ConfigMaps: what each is known by, and the text itself when it has to be sent.

A ConfigMap holds up to a mebibyte, and every task may name one of its own. So what the operator keeps of all of them is
digests and sizes, of the keys that tasks name; of the texts the newest, as far as ``MOST_BYTES`` go. One that is needed and
not kept is read again: it is the same, or it was edited since, which the digest tells.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from mlora_operator.reconcile.cluster.read_cache import MAX_AGE, MISSING_AGE, ReadCache
from mlora_operator.reconcile.state.snapshot import ConfigMapText, Key

MOST_BYTES = 64 * 2**20  # of texts that are kept
AT_ONCE, MOST_READS = 4, 8  # reads of ConfigMaps under way, and in one pass
REFRESHED = 4 * 2**20  # bytes a second that are read again, at most, to notice what was edited

Wanted = Mapping[Key, frozenset[str]]  # names of the keys that tasks name, by ConfigMap


class TextGone(Exception):
    """Its ConfigMap does not hold it any more. ``str(error)`` names the ConfigMap."""


async def no_text(digest: str) -> str:
    """Where nobody reads ConfigMaps. Raises TextGone."""
    raise TextGone(f"nothing is known of {digest}")


@dataclass(frozen=True, slots=True)
class _Read:
    """What was looked for in a ConfigMap, and what of it is there."""

    key: Key
    names: frozenset[str]
    texts: Mapping[str, ConfigMapText] | None = field(repr=False)  # None: there is no such ConfigMap


class ConfigMapTexts:
    def __init__(
        self,
        read: Callable[[Key], Awaitable[Mapping[str, str] | None]],
        clock: Callable[[], float],
        most: int = MOST_BYTES,
    ) -> None:
        self._read_all = read
        self._shelf: ReadCache[Key, _Read] = ReadCache("ConfigMap", self._read, clock, AT_ONCE, MOST_READS)
        self._wanted: Wanted = {}
        self._most = most
        self._kept: OrderedDict[str, tuple[str, int]] = (
            OrderedDict()
        )  # with bytes; what was used last at the end
        self._bytes = 0
        self._where: dict[str, tuple[Key, str]] = {}  # ConfigMap and key by digest
        self._max_age = MAX_AGE

    async def of(self, wanted: Wanted) -> Mapping[Key, Mapping[str, ConfigMapText] | None]:
        """What each ConfigMap holds of what is wanted; None for one that is not there."""
        self._wanted = wanted
        known = sum(text.size for one in self._shelf.values() for text in (one.texts or {}).values())
        self._max_age = max(MAX_AGE, known / REFRESHED)
        found = await self._shelf.get(wanted, self._age)
        self._where = {
            text.digest: (key, name) for key, one in found.items() for name, text in (one.texts or {}).items()
        }
        return {key: one.texts for key, one in found.items()}

    @property
    def kept(self) -> frozenset[str]:
        """Digests of the texts that can be had though their ConfigMaps were edited."""
        return frozenset(self._kept)

    def unread(self) -> Mapping[Key, str]:
        return self._shelf.unread()

    def later(self) -> frozenset[Key]:
        return self._shelf.later

    async def text(self, digest: str) -> str:
        """Raises TextGone, and what reading raises."""
        if digest not in self._kept:
            key, name = self._where.get(digest, (None, ""))
            if key is None:
                raise TextGone("no ConfigMap holds it")
            data = await self._read_all(key)
            self._keep(data[name] if data is not None and name in data else "")
            if digest not in self._kept:
                self._shelf.forget(key)
                raise TextGone(f"ConfigMap {key} was edited or deleted")
        self._kept.move_to_end(digest)
        return self._kept[digest][0]

    def _age(self, one: _Read) -> float:
        if not self._wanted.get(one.key, frozenset()) <= one.names:
            return 0.0
        return self._max_age if one.texts is not None else MISSING_AGE

    async def _read(self, key: Key) -> _Read:
        names = self._wanted[key]
        data = await self._read_all(key)
        if data is None:
            return _Read(key, names, None)
        return _Read(key, names, {name: self._keep(data[name]) for name in sorted(names) if name in data})

    def _keep(self, text: str) -> ConfigMapText:
        known = ConfigMapText.of(text)
        if known.digest not in self._kept:
            self._kept[known.digest] = text, known.size
            self._bytes += known.size
        self._kept.move_to_end(known.digest)
        while self._bytes > self._most and len(self._kept) > 1:
            self._bytes -= self._kept.popitem(last=False)[1][1]
        return known
