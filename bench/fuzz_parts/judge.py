"""What hostile objects caused: requests that left their namespace, and lines of a log that no record is."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from posixpath import normpath
from urllib.parse import parse_qsl, unquote

from bench.fuzz_parts.texts import FORGED
from tests.fixtures.api_proxy import Request

_QUERY = frozenset(
    {
        "watch", "resourceVersion", "resourceVersionMatch", "labelSelector", "fieldSelector", "allowWatchBookmarks",
        "sendInitialEvents", "timeoutSeconds", "limit", "continue", "fieldManager", "force",
    }
)  # fmt: skip
_RECORD = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (DEBUG|INFO|WARNING|ERROR|CRITICAL) ")


@dataclass(frozen=True, slots=True)
class Ground:
    """``hostile``: where the objects are. ``own``: the operator's namespace. ``named``: what it reads there by name for its
    own pipeline, and its lease. All other namespaces belong to somebody else."""

    hostile: str
    own: str
    named: frozenset[str]


def escaped(requests: Iterable[Request], ground: Ground) -> list[str]:
    """The requests that no object of the hostile namespace may cause."""
    return [f"{one.method} {one.path}" for one in requests if not _stays(one.path, ground)]


def _stays(target: str, ground: Ground) -> bool:
    path, _, query = target.partition("?")
    seen = _as_the_server_reads_it(path)
    if seen != path or any(name not in _QUERY for name, _ in parse_qsl(query, keep_blank_values=True)):
        return False
    parts = seen.strip("/").split("/")
    if "namespaces" not in parts:
        return parts[0] in ("api", "apis", "version")  # lists and watches of all, and what the server has
    namespace, *rest = parts[parts.index("namespaces") + 1 :] or [""]
    if len(rest) < 2:
        return rest != [] or namespace in (
            ground.hostile,
            ground.own,
        )  # a collection, or a namespace's labels
    if namespace == ground.hostile:
        return True
    if namespace != ground.own:
        return False
    return rest[0] not in ("secrets", "configmaps", "leases") or rest[1] in ground.named


def _as_the_server_reads_it(path: str) -> str:
    """Decoded as often as anybody on the way might, with steps up taken."""
    for _ in range(3):
        path = unquote(path)
    return normpath(path)


def forged(log: str) -> list[str]:
    """The lines that are neither a record nor a part of one that is indented, and those that a text has made."""
    return [
        line
        for line in log.splitlines()
        if line.startswith(FORGED) or not (_RECORD.match(line) or line.startswith("  ") or not line)
    ]
