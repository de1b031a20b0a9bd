"""Secrets, tokens and namespace labels: read again and again rather than watched, but not at every wake."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from mlora_operator.reconcile.ports import Cluster, Trust
from mlora_operator.reconcile.snapshot import Key, Pipeline, SecretData
from mlora_worker.protocol import one_line

logger = logging.getLogger(__name__)
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

MAX_AGE = 10.0  # seconds after which a value is read again: how late a corrected Secret is noticed
MISSING_AGE = 2.0  # the same for one that is not there, since someone is likely to make it now
# Seconds until what could not be read is tried again: twice as long each time, so that one that can never be read costs
# neither the API server nor the log anything to speak of.
FIRST_RETRY, LONGEST_RETRY = 1.0, 60.0
SHOWN_CAUSE = 300  # characters of an error that a status shows
SHOWN_KEYS = 5  # of those that could not be read, in one line of the log


@dataclass(frozen=True, slots=True)
class _Failing:
    """Reads of one key that fail, since the last one that did not."""

    cause: str
    again_at: float
    times: int


@dataclass(frozen=True, slots=True)
class _Known(Generic[V]):
    value: V
    read_at: float


class _Shelf(Generic[K, V]):
    """Values of one kind by key. A read that fails leaves the former value in force, and is tried again later and later."""

    def __init__(self, kind: str, read: Callable[[K], Awaitable[V]], clock: Callable[[], float]) -> None:
        self._kind = kind
        self._read = read
        self._clock = clock
        self._known: dict[K, _Known[V]] = {}
        self._failing: dict[K, _Failing] = {}

    async def get(self, keys: Iterable[K], max_age: Callable[[V], float]) -> dict[K, V]:
        wanted = set(keys)
        self._known = {key: known for key, known in self._known.items() if key in wanted}
        self._failing = {key: failing for key, failing in self._failing.items() if key in wanted}
        old = [key for key in wanted if self._is_due(key, max_age)]
        failed = [
            key for key in await asyncio.gather(*(self._refresh(key) for key in old)) if key is not None
        ]
        if failed:
            shown = "; ".join(f"{key}: {self._failing[key].cause}" for key in failed[:SHOWN_KEYS])
            more = len(failed) - SHOWN_KEYS
            logger.warning("cannot read %s %s%s", self._kind, shown, f"; and {more} more" if more > 0 else "")
        return {key: known.value for key, known in self._known.items()}

    def unread(self) -> dict[K, str]:
        """Why what was wanted last could not be read, where nothing is known of it."""
        return {key: failing.cause for key, failing in self._failing.items() if key not in self._known}

    def _is_due(self, key: K, max_age: Callable[[V], float]) -> bool:
        failing = self._failing.get(key)
        if failing is not None:
            return self._clock() >= failing.again_at
        known = self._known.get(key)
        return known is None or self._clock() - known.read_at >= max_age(known.value)

    async def _refresh(self, key: K) -> K | None:
        """``key`` when it could not be read."""
        try:
            self._known[key] = _Known(await self._read(key), self._clock())
        except Exception as error:
            times = self._failing[key].times + 1 if key in self._failing else 1
            wait = min(FIRST_RETRY * 2.0 ** min(times - 1, 16), LONGEST_RETRY)
            cause = one_line(str(error) or type(error).__name__)[:SHOWN_CAUSE]
            self._failing[key] = _Failing(cause, self._clock() + wait, times)
            return key
        self._failing.pop(key, None)
        return None


class _Lasting(Generic[K, V]):
    """What exists already, by key. What does not is asked for again at once, and the last one holds meanwhile."""

    def __init__(
        self, kind: str, read: Callable[[K], Awaitable[V | None]], clock: Callable[[], float]
    ) -> None:
        self._shelf: _Shelf[K, V | None] = _Shelf(kind, read, clock)
        self._last: dict[K, V] = {}

    async def get(self, keys: Iterable[K]) -> Mapping[K, V]:
        found = await self._shelf.get(keys, lambda one: MAX_AGE if one else 0.0)
        last = {key: one or self._last.get(key) for key, one in found.items()}
        self._last = {key: one for key, one in last.items() if one is not None}
        return self._last


class Lookups:
    def __init__(self, cluster: Cluster, clock: Callable[[], float]) -> None:
        self._pipelines: Mapping[Key, Pipeline] = {}
        self._cluster = cluster
        self._secrets: _Shelf[Key, SecretData | None] = _Shelf("Secret", cluster.read_secret, clock)
        self._config_maps: _Shelf[Key, Mapping[str, str] | None] = _Shelf(
            "ConfigMap", cluster.read_config_map, clock
        )
        self._labels: _Shelf[str, Mapping[str, str]] = _Shelf(
            "the labels of namespace", cluster.read_namespace_labels, clock
        )
        self._tokens: _Lasting[Key, str] = _Lasting("the token of", self._read_token, clock)
        self._trusts: _Lasting[Key, Trust] = _Lasting("the certificate of", self._read_trust, clock)

    async def secrets(self, keys: Iterable[Key]) -> Mapping[Key, SecretData | None]:
        """Each Secret's data, None for one that is not there."""
        return await self._secrets.get(keys, lambda data: MAX_AGE if data is not None else MISSING_AGE)

    async def config_maps(self, keys: Iterable[Key]) -> Mapping[Key, Mapping[str, str] | None]:
        """Each ConfigMap's texts, None for one that is not there."""
        return await self._config_maps.get(keys, lambda data: MAX_AGE if data is not None else MISSING_AGE)

    async def namespace_labels(self, namespaces: Iterable[str]) -> Mapping[str, Mapping[str, str]]:
        return await self._labels.get(namespaces, lambda _: MAX_AGE)

    def unread(self) -> Mapping[tuple[str, Key], str]:
        """By kind and name, why a Secret or a ConfigMap that was wanted last could not be read."""
        shelves: tuple[tuple[str, _Shelf[Key, Any]], ...] = (
            ("Secret", self._secrets),
            ("ConfigMap", self._config_maps),
        )
        return {(kind, key): cause for kind, shelf in shelves for key, cause in shelf.unread().items()}

    async def tokens(self, pipelines: Iterable[Pipeline]) -> Mapping[Key, str]:
        """The bearer tokens that exist already; one that does not is asked for again at once. While one is being made
        anew, the last one holds: the coordinator has no other yet.
        """
        self._pipelines = {pipeline.key: pipeline for pipeline in pipelines}
        return await self._tokens.get(self._pipelines)

    async def trusts(self, pipelines: Iterable[Pipeline]) -> Mapping[Key, Trust]:
        """By what coordinators that serve HTTPS prove themselves, as ``tokens``, which has to be asked before."""
        return await self._trusts.get({pipeline.key for pipeline in pipelines})

    async def _read_token(self, key: Key) -> str | None:
        return await self._cluster.read_token(self._pipelines[key])

    async def _read_trust(self, key: Key) -> Trust | None:
        return await self._cluster.read_trust(self._pipelines[key])
