"""Every field of a resource, as its schema has them, and objects in which some hold what they should not."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from random import Random
from typing import Any

from bench.fuzz_parts.texts import Hostile

JSON = dict[str, Any]
ITEM, VALUE = "[]", "{}"  # steps of a path: into a list, and into a mapping with keys of one's own
# Of one spoilt field. The API server reads 3 MiB of a request, so two of the largest are too much for it. And it compares
# each mistake that it finds with all others, in resources of every kind: thirty thousand of them, lists in lists of what
# lacks a field, keep it busy for half a minute, which says nothing of the operator (docs/operators/security.md).
LARGEST = 2 * 2**20  # bytes as JSON
MOST_ENTRIES = 1000  # of all its lists and mappings together
_BOUNDS = frozenset(
    {
        "pattern", "x-kubernetes-validations", "minLength", "maxLength", "minItems", "maxItems", "maxProperties",
        "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "enum", "format", "required", "default",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Field:
    """``kind``: string, integer, number, boolean, or ``any`` of what is passed on as it is."""

    path: tuple[str, ...]
    kind: str


def fields(schema: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[Field]:
    """All leaves of a structural schema."""
    kind = schema.get("type", "any")
    if kind == "array":
        yield from fields(schema["items"], (*path, ITEM))
    elif kind == "object" and "properties" in schema:
        for name, child in schema["properties"].items():
            yield from fields(child, (*path, name))
    elif kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        yield from fields(schema["additionalProperties"], (*path, VALUE))
    else:
        yield Field(path, "any" if kind == "object" else kind)


def without_bounds(crd: Mapping[str, Any]) -> JSON:
    """A definition that lets everything of the right type through, as one of long ago might have."""
    loose = deepcopy(dict(crd))
    for version in loose["spec"]["versions"]:
        schema = version["schema"]["openAPIV3Schema"]
        schema["properties"]["spec"] = _loosened(schema["properties"]["spec"])
    return loose


def _loosened(node: Any) -> Any:
    if isinstance(node, list):
        return [_loosened(one) for one in node]
    if not isinstance(node, dict):
        return node
    kept = {}
    for key, value in node.items():
        if key == "properties":
            kept[key] = {name: _loosened(child) for name, child in value.items()}
        elif key not in _BOUNDS:
            kept[key] = _loosened(value)
    return kept


def spoilt(base: Mapping[str, Any], where: list[Field], hostile: Hostile, random: Random) -> JSON:
    """``base`` (a spec) with one to three fields that hold something hostile."""
    spec = deepcopy(dict(base))
    for field in random.choices(where, k=random.randint(1, 3)):
        _put(spec, field.path, _hostile(field, hostile, random), hostile, random)
    return spec


def _hostile(field: Field, hostile: Hostile, random: Random) -> Any:
    if field.kind != "any":
        return hostile.value(field.kind)
    leaf = hostile.value(random.choice(("string", "integer", "boolean")))
    for _ in range(random.choice((0, 1, 3, 30))):
        leaf = {hostile.text()[:200]: leaf} if random.random() < 0.7 else [leaf]
    return leaf if isinstance(leaf, dict) else {hostile.text()[:200]: leaf}


def _put(node: JSON, path: tuple[str, ...], value: Any, hostile: Hostile, random: Random) -> int:
    """Sets what lies at ``path``; lists and mappings on the way are made with one entry, or many, as far as bounds allow.
    How many entries the innermost ones have, all together."""
    name, *rest = path
    if not rest:
        node[name] = value
        return 1
    if rest[0] not in (ITEM, VALUE):
        child = node.get(name)
        node[name] = child if isinstance(child, dict) else {}
        return _put(node[name], tuple(rest), value, hostile, random)
    keys: list[str] = []
    entries: list[Any] = []
    size = count = 0
    for _ in range(random.choice((1, 1, 2, 70) if rest[0] == ITEM else (1, 1, 3, 70))):
        entry: JSON = {}
        more = _put(entry, ("x", *rest[1:]), value, hostile, random)
        key = hostile.text()[:2000] if rest[0] == VALUE else ""
        size += len(json.dumps([key, entry["x"]]))
        if entries and (size > LARGEST or count + more > MOST_ENTRIES):
            break
        count += more
        keys.append(key)
        entries.append(entry["x"])
    node[name] = entries if rest[0] == ITEM else dict(zip(keys, entries, strict=True))
    return count
