"""Secrets, tokens and namespace labels: read again and again rather than watched, but not at every wake."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping
from typing import Generic, TypeVar

from mlora_operator.reconcile.cluster.config_map_texts import ConfigMapTexts
from mlora_operator.reconcile.cluster.read_cache import MAX_AGE, MISSING_AGE, ReadCache
from mlora_operator.reconcile.ports import Cluster, CoordinatorTrust
from mlora_operator.reconcile.state.snapshot import Key, Pipeline, SecretData

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class _Lasting(Generic[K, V]):
    """What exists already, by key. What does not is asked for again at once, and the last one holds meanwhile."""

    def __init__(
        self, kind: str, read: Callable[[K], Awaitable[V | None]], clock: Callable[[], float]
    ) -> None:
        self._shelf: ReadCache[K, V | None] = ReadCache(kind, read, clock)
        self._last: dict[K, V] = {}

    async def get(self, keys: Iterable[K]) -> Mapping[K, V]:
        found = await self._shelf.get(keys, lambda one: MAX_AGE if one else 0.0)
        last = {key: one or self._last.get(key) for key, one in found.items()}
        self._last = {key: one for key, one in last.items() if one is not None}
        return self._last


class CachedReads:
    def __init__(self, cluster: Cluster, clock: Callable[[], float]) -> None:
        self._pipelines: Mapping[Key, Pipeline] = {}
        self._cluster = cluster
        self._secrets: ReadCache[Key, SecretData | None] = ReadCache("Secret", cluster.read_secret, clock)
        self.texts = ConfigMapTexts(cluster.read_config_map, clock)
        self._labels: ReadCache[str, Mapping[str, str]] = ReadCache(
            "the labels of namespace", cluster.read_namespace_labels, clock
        )
        self._tokens: _Lasting[Key, str] = _Lasting("the token of", self._read_token, clock)
        self._trusts: _Lasting[Key, CoordinatorTrust] = _Lasting(
            "the certificate of", self._read_trust, clock
        )

    async def secrets(self, keys: Iterable[Key]) -> Mapping[Key, SecretData | None]:
        """Each Secret's data, None for one that is not there."""
        return await self._secrets.get(keys, lambda data: MAX_AGE if data is not None else MISSING_AGE)

    async def namespace_labels(self, namespaces: Iterable[str]) -> Mapping[str, Mapping[str, str]]:
        return await self._labels.get(namespaces, lambda _: MAX_AGE)

    def unread(self) -> Mapping[tuple[str, Key], str]:
        """By kind and name, why a Secret or a ConfigMap that was wanted last could not be read."""
        kinds = (("Secret", self._secrets.unread()), ("ConfigMap", self.texts.unread()))
        return {(kind, key): cause for kind, unread in kinds for key, cause in unread.items()}

    def later(self) -> frozenset[tuple[str, Key]]:
        """Those whose turn to be read comes with the next pass."""
        kinds = (("Secret", self._secrets.later), ("ConfigMap", self.texts.later()))
        return frozenset((kind, key) for kind, keys in kinds for key in keys)

    async def tokens(self, pipelines: Iterable[Pipeline]) -> Mapping[Key, str]:
        """The bearer tokens that exist already; one that does not is asked for again at once. While one is being made
        anew, the last one holds: the coordinator has no other yet.
        """
        self._pipelines = {pipeline.key: pipeline for pipeline in pipelines}
        return await self._tokens.get(self._pipelines)

    async def trusts(self, pipelines: Iterable[Pipeline]) -> Mapping[Key, CoordinatorTrust]:
        """By what coordinators that serve HTTPS prove themselves, as ``tokens``, which has to be asked before."""
        return await self._trusts.get({pipeline.key for pipeline in pipelines})

    async def _read_token(self, key: Key) -> str | None:
        return await self._cluster.read_token(self._pipelines[key])

    async def _read_trust(self, key: Key) -> CoordinatorTrust | None:
        return await self._cluster.read_trust(self._pipelines[key])
