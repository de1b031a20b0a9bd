"""One pass: what differs between the store and the folder, and between the folder and the servers, is made equal.

A pass remembers nothing that it could not find again: what is shown is in the folder, and what is loaded the servers say.
So it may be interrupted at any point, and a server that has been restarted gets everything again.

1. Each adapter's manifest is read. One that is new, or another one than is shown, is fetched, verified and shown.
2. With ``prune``, names that the store no longer has are removed. A name stays where the store could not be read, where two
   adapters have it, where an upload is in progress or checkpoints lie, and where its manifest or its files are wrong.
3. Each server is asked what it has. What is shown is loaded, under the path of its version; what it has from this folder
   and is no longer shown is unloaded. What it has from elsewhere is left alone.
4. Versions that neither were shown when the pass began, nor are now, nor are loaded by a server, are removed.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from mlora_operator.download import (
    AdapterFolders,
    AdapterNotFound,
    DownloadError,
    Manifest,
    read_manifest,
)
from mlora_operator.sync.folder import VERSIONS, ShownAdapters, Version
from mlora_operator.sync.needs import needs_of
from mlora_operator.sync.news import News, NewsKind, problem
from mlora_operator.sync.places import AdapterPlace, Places
from mlora_operator.sync.requests import ServerError, ServerRefused
from mlora_operator.sync.servers import ModelServer

_MARK = ".mlora-upload.json"  # there from before the former manifest goes until the new one has come
_CHECKPOINTS = "checkpoints"  # there while a task trains, unless its pipeline keeps them elsewhere


@dataclass
class SyncPass:
    """``seen_as``: where the servers see the folder. ``base_model``: the only one whose adapters are shown."""

    folder: ShownAdapters
    seen_as: str
    servers: Sequence[ModelServer]
    prune: bool
    base_model: str | None
    pause: Callable[[float], None]
    _keep: set[str] = field(default_factory=set)  # names that this pass does not remove

    def run(self, places: Places) -> Iterator[News]:
        """What was done, as it is done. Raises FolderInUse where the folder itself cannot be read."""
        before = self.folder.shown()
        self._keep = set(places.held)
        yield from places.problems
        for place in places.found:
            try:
                yield from self._follow(place, before)
            except DownloadError as error:
                self._keep.add(place.name)
                yield problem(place.name, place.uri, error)
        if self.prune and places.complete:
            for name in sorted(before.keys() - self._keep):
                self.folder.hide(name)
                yield News(
                    NewsKind.REMOVED, name, str(self.folder.folder / name), "the store no longer has it"
                )
        shown = self.folder.shown()
        loaded: set[Version] | None = set()
        for server in self.servers:
            try:
                has = server.loaded()
                yield from self._align(server, has, shown)
                at_last = self._ours(server.loaded())
            except ServerError as error:
                loaded = None  # it may read any of the versions
                yield problem("", server.connection.url, error)
                continue
            if loaded is not None:
                loaded |= at_last
        if loaded is not None:
            self.folder.remove_others({*before.items(), *shown.items(), *loaded})

    def _follow(self, place: AdapterPlace, before: dict[str, str]) -> Iterator[News]:
        try:
            manifest = read_manifest(place.source)
        except AdapterNotFound:
            if place.uid is not None or (place.name in before and _is_unfinished(place.source)):
                self._keep.add(place.name)
            return
        if place.uid not in (None, manifest.task_uid):
            self._keep.add(place.name)
            owner = f"{manifest.namespace}/{manifest.name}"
            yield problem(place.name, place.uri, AdapterNotFound(f"it is of another task: {owner}"))
            return
        if self.base_model not in (None, manifest.base_model):
            return
        self._keep.add(place.name)
        if self.folder.add(place.name, manifest, place.source, self.pause):
            kind = NewsKind.REPLACED if place.name in before else NewsKind.ADDED
            yield News(kind, place.name, place.uri, _what(manifest))

    def _align(
        self, server: ModelServer, has: dict[str, str | None], shown: dict[str, str]
    ) -> Iterator[News]:
        """Raises ServerSilent; what the server refuses of one adapter keeps no other one from it."""
        url = server.connection.url
        for name in sorted(has.keys() - shown.keys()):
            root = has[name]
            if root is not None and self._is_below(root):
                try:
                    server.unload(name)
                    yield News(NewsKind.UNLOADED, name, url, f"{server.name} at {url}")
                except ServerRefused as error:
                    yield problem(name, url, error)
        for name, digest in sorted(shown.items()):
            version = self.folder.path(name, digest)
            path = posixpath.join(self.seen_as, version)
            root = has.get(name)
            try:
                if name not in has:
                    server.load(name, path, needs_of(self.folder.folder / version))
                    yield News(NewsKind.LOADED, name, url, f"{server.name} at {url}")
                elif root is None or not self._is_below(root):
                    what = "a base model" if root is None else f"an adapter from {root}"
                    message = f"{server.name} at {url} has {what} of this name, which is not replaced"
                    yield problem(name, url, ServerRefused(message))
                elif posixpath.normpath(root) != path:
                    server.replace(name, path, needs_of(self.folder.folder / version))
                    yield News(NewsKind.RELOADED, name, url, f"{server.name} at {url}")
            except ServerRefused as error:
                yield problem(name, url, error)

    def _is_below(self, path: str) -> bool:
        return posixpath.normpath(path).startswith(self.seen_as.rstrip("/") + "/")

    def _ours(self, loaded: dict[str, str | None]) -> set[Version]:
        """The versions among what a server has."""
        start = posixpath.join(self.seen_as, VERSIONS) + "/"
        paths = [posixpath.normpath(root) for root in loaded.values() if root]
        parts = [path.removeprefix(start).split("/") for path in paths if path.startswith(start)]
        return {(part[0], part[1]) for part in parts if len(part) == 2}


def _is_unfinished(source: AdapterFolders) -> bool:
    """An upload is in progress, or a task trains there. Raises AdapterCorrupt, StoreRefused, StoreSilent."""
    try:
        next(iter(source.read(_MARK)), None)
    except AdapterNotFound:
        return _CHECKPOINTS in source.names()
    return True


def _what(manifest: Manifest) -> str:
    return (
        f"{len(manifest.files)} files, {manifest.bytes:,} bytes, base model {manifest.base_model}, "
        f"{manifest.step} steps"
    )
