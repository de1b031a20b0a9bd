"""YAML as kubectl reads it, with the line of every field.

PyYAML alone is not enough: it follows YAML 1.1, where ``1e-4`` is text (a float needs a dot there), ``12:30``
is the number 750 and ``2026-01-01`` a date. kubectl makes the number 0.0001 of the first, text of the others,
and writes whole floats as integers when it makes JSON of them. The same file must mean the same to both.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

Path = tuple[str | int, ...]

_MAX_NODES = 100_000  # aliases of aliases grow without bound


class DocumentError(Exception):
    """The text is not the YAML that kubectl takes; ``line`` counts from 1."""

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.line = line


@dataclass(frozen=True, slots=True)
class Document:
    """One document of a file: plain JSON values, and the line of each path in it."""

    value: Any
    line: int
    lines: Mapping[Path, int] = field(repr=False)

    def line_of(self, path: Path) -> int:
        """The line of ``path``, or of its nearest ancestor that is there."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, self.line)


def parse(text: str) -> Iterator[Document]:
    """The documents of ``text``; empty ones are left out. Raises DocumentError."""
    try:
        loader = _Loader(text)
        while loader.check_node():
            node: yaml.Node = loader.get_node()  # type: ignore[assignment] # check_node says there is one
            lines: dict[Path, int] = {}
            value = _Reader(loader, lines).read(node, ())
            if value is not None:
                yield Document(value, node.start_mark.line + 1, lines)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = ", ".join(part for part in (error.context, error.problem) if part)
        raise DocumentError(f"not YAML: {what}", mark.line + 1 if mark else 1) from error
    except yaml.YAMLError as error:
        raise DocumentError(f"not YAML: {error}", 1) from error


class _Loader(yaml.SafeLoader):
    """Resolves plain scalars as kubectl's YAML library does."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - the base class's own attribute


_DIGITS = list("-+0123456789.")
for _tag, _pattern, _first in (
    ("bool", r"(?:y|Y|yes|Yes|YES|on|On|ON|true|True|TRUE|n|N|no|No|NO|off|Off|OFF|false|False|FALSE)", None),
    ("null", r"(?:~|null|Null|NULL|)", None),
    ("int", r"[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|0o?[0-7_]+|0|[1-9][0-9_]*)", _DIGITS),
    ("float", r"[-+]?(?:\.[0-9_]+|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?", _DIGITS),
    ("float", r"(?:[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))", _DIGITS),
    ("merge", "<<", ["<"]),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^{_pattern}$"), _first)

_CONTAINERS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")
_TRUE = {"y", "yes", "on", "true"}


class _Reader:
    """Turns nodes into JSON values and notes their lines."""

    def __init__(self, loader: _Loader, lines: dict[Path, int]) -> None:
        self._loader = loader
        self._lines = lines
        self._nodes = 0
        self._open: list[yaml.Node] = []

    def read(self, node: yaml.Node, path: Path) -> Any:
        line = node.start_mark.line + 1
        self._lines.setdefault(path, line)
        self._nodes += 1
        if self._nodes > _MAX_NODES:
            raise DocumentError("aliases make it too large", line)
        if any(node is outer for outer in self._open):
            raise DocumentError("an alias contains itself", line)
        if not isinstance(node, yaml.ScalarNode) and node.tag not in _CONTAINERS:
            raise DocumentError(f"the tag {node.tag} is not supported in a manifest", line)
        self._open.append(node)
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            if isinstance(node, yaml.SequenceNode):
                return [self.read(child, (*path, index)) for index, child in enumerate(node.value)]
            return _scalar(node)
        finally:
            self._open.pop()

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        own = [key.value for key, _ in node.value if not key.tag.endswith(":merge")]
        self._loader.flatten_mapping(node)  # puts merged pairs first, so that own ones override them
        inherited = len(node.value) - len(own)
        mapping: dict[str, Any] = {}
        seen: set[Hashable] = set()
        for index, (key_node, child) in enumerate(node.value):
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise DocumentError("a key must be text", line)
            key = key_node.value
            if index >= inherited:
                if key in seen:
                    raise DocumentError(f"{'.'.join(map(str, (*path, key)))} is defined twice", line)
                seen.add(key)
            self._lines[*path, key] = line
            mapping[key] = self.read(child, (*path, key))
        return mapping


def _scalar(node: yaml.Node) -> Any:
    tag, text = node.tag.rsplit(":", 1)[-1], node.value
    if tag == "null":
        return None
    if tag == "bool":
        return text.lower() in _TRUE
    try:
        if tag == "int":
            return _integer(text.replace("_", ""))
        if tag == "float":
            return _number(text, node.start_mark.line + 1)
    except ValueError:  # 0x_ looks like a number, and is none: text, as in kubectl
        return text
    if tag in ("str", "timestamp"):
        return text
    raise DocumentError(f"the tag {node.tag} is not supported in a manifest", node.start_mark.line + 1)


def _integer(text: str) -> int:
    sign, digits = (-1, text[1:]) if text.startswith("-") else (1, text.removeprefix("+"))
    if len(digits) > 1 and digits[0] == "0" and digits[1].isdigit():
        return sign * int(digits, 8)  # a leading zero means octal, as in YAML 1.1
    return sign * int(digits, 0)


def _number(text: str, line: int) -> float | int:
    lowered = text.lower().replace("_", "")
    value = float(lowered.replace(".inf", "inf").replace(".nan", "nan"))
    if not math.isfinite(value):
        raise DocumentError(f"{text} is not a valid JSON number", line)
    return int(value) if value.is_integer() and abs(value) < 1e21 else value
