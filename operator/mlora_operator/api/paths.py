"""Paths of the Kubernetes API, and the one check that every request passes. Pure.

The API server decodes a path before it splits it: ``..%2f`` is a step up there, so quoting a name alone protects nobody.
Each name is quoted, so that it is one part of the path, and a path with a part that is not the name of a resource or an
object, which a quoted one never is, is refused before it is sent.
"""

from __future__ import annotations

import re
from urllib.parse import quote, unquote

from mlora_worker.protocol import DNS_NAME

LONGEST_NAME = 253

_PART = re.compile(DNS_NAME)  # of all objects that the operator names, and of resources, groups and versions
# A user's own program may name any kind of object: names of roles may hold capitals and colons.
_ANY_PART = re.compile(r"[A-Za-z0-9]([-.:_A-Za-z0-9]{0,251}[A-Za-z0-9])?")


class UnsafePath(ValueError):
    """Some part of a path is not the name of anything. The message has the part, with what it holds made visible; ``part``:
    as it was given."""

    def __init__(self, part: str, path: str) -> None:
        super().__init__(f"{part} is not a valid Kubernetes name: {path!r}")
        self.part = unquote(part)


def collection(api_version: str, plural: str, namespace: str | None) -> str:
    """Path of all objects of a kind, in one namespace or in all."""
    root = f"/apis/{api_version}" if "/" in api_version else f"/api/{api_version}"
    return f"{root}/namespaces/{_quoted(namespace)}/{plural}" if namespace is not None else f"{root}/{plural}"


def item(api_version: str, plural: str, namespace: str, name: str) -> str:
    """Path of one object."""
    return f"{collection(api_version, plural, namespace)}/{_quoted(name)}"


def checked(path: str, *, any_kind: bool = False) -> str:
    """``path`` itself. ``any_kind``: objects need not be of the kinds that the operator names. Raises UnsafePath."""
    part = _ANY_PART if any_kind else _PART
    first, *parts = path.split("/")
    wrong = next((one for one in parts if len(one) > LONGEST_NAME or part.fullmatch(one) is None), None)
    if first or not parts or wrong is not None:
        raise UnsafePath(wrong if wrong is not None else path, path)
    return path


def _quoted(name: str) -> str:
    return quote(name, safe=":", errors="replace")
