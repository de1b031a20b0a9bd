"""Which adapters there are below the addresses of a store, and under which names they are shown."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from mlora_operator.download import (
    AdapterCorrupt,
    AdapterFolders,
    AdapterNotFound,
    AdapterSource,
    DownloadError,
    StoreRefused,
    read_manifest,
)
from mlora_operator.sync.news import News, problem

MOST_ADAPTERS = 10_000  # below one address
LONGEST_NAME = 128  # characters
# A folder's name and a model's name at once: no path, nothing hidden, no sign that a shell or a URL reads.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class UnusableName(Exception):
    """The store has a folder by a name that no adapter is shown under."""


class SameName(Exception):
    """Several adapters would be shown under one name."""


@dataclass(frozen=True)
class AdapterPlace:
    """Where an adapter is, or will be once it is finished. ``uid``: the task whose adapter alone is wanted."""

    name: str
    uri: str
    source: AdapterFolders = field(compare=False, repr=False)
    uid: str | None = None


@dataclass(frozen=True)
class Places:
    """``held``: names that are left as they are, since what belongs there is not known. ``complete``: all that there is was
    seen, so that what is missing may be removed.
    """

    found: tuple[AdapterPlace, ...] = ()
    held: frozenset[str] = frozenset()
    problems: tuple[News, ...] = ()
    complete: bool = True


def is_usable(name: str) -> bool:
    return len(name) <= LONGEST_NAME and _NAME.fullmatch(name) is not None


def check_name(name: str) -> None:
    """Raises UnusableName."""
    if not is_usable(name):
        raise UnusableName(
            f"{name[:LONGEST_NAME]!r} cannot be the name of an adapter: use at most {LONGEST_NAME} letters, digits, dots, "
            f"hyphens and underscores, the first a letter or a digit"
        )


def places_below(uri: str, folders: AdapterFolders) -> Places:
    """The adapter at ``uri``, if there is one; else all that are directly below it, whether finished or not."""
    uri = uri.rstrip("/")
    try:
        if _is_adapter(folders):
            return _named([(uri.rsplit("/", 1)[-1], uri)], lambda _: folders)
        found: list[str] = []
        for name in folders.names():
            if len(found) == MOST_ADAPTERS:
                message = f"{uri} has more than {MOST_ADAPTERS:,} folders: give a prefix with fewer"
                raise StoreRefused(message)
            found.append(name)
    except DownloadError as error:
        return Places(problems=(problem("", uri, error),), complete=False)
    return _named([(name, f"{uri}/{name}") for name in sorted(set(found))], folders.below)


def joined(parts: Iterable[Places]) -> Places:
    """All together. A name that several adapters have is held: none of them replaces what is shown."""
    parts = list(parts)
    by_name: dict[str, list[AdapterPlace]] = defaultdict(list)
    for place in (place for part in parts for place in part.found):
        by_name[place.name].append(place)
    held = {name for part in parts for name in part.held}
    problems = [news for part in parts for news in part.problems]
    found = []
    for _, places in sorted(by_name.items()):
        if len({place.uri for place in places}) == 1:
            found.append(places[0])
            continue
        held |= {place.name for place in places}
        problems.append(problem(places[0].name, places[0].uri, _same_name(places)))
    return Places(tuple(found), frozenset(held), tuple(problems), all(part.complete for part in parts))


def _same_name(places: Sequence[AdapterPlace]) -> SameName:
    uris = " and ".join(sorted({place.uri for place in places})[:3])
    return SameName(
        f"{len(places)} adapters have the name {places[0].name}: {uris}. None of them is taken: give prefixes "
        f"of which only one has that name"
    )


def _named(found: Sequence[tuple[str, str]], source_of: Callable[[str], AdapterFolders]) -> Places:
    """Names with their addresses. ``source_of`` is asked of usable names alone."""
    places, problems = [], []
    for name, uri in found:
        try:
            check_name(name)
        except UnusableName as error:
            problems.append(problem("", uri, error))
        else:
            places.append(AdapterPlace(name, uri, source_of(name)))
    return Places(tuple(places), problems=tuple(problems))


def _is_adapter(source: AdapterSource) -> bool:
    """Raises DownloadError, but not for a manifest that is none."""
    try:
        read_manifest(source)
    except AdapterNotFound:
        return False
    except AdapterCorrupt:
        return True
    return True
