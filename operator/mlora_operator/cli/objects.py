"""Objects of a cluster as kubectl would print them: for programs, and for files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

JSON = Mapping[str, Any]


def as_documents(objects: Sequence[JSON], *, one: bool) -> JSON:
    """The object itself where ``one`` was asked for, else a List of all; without the notes of who wrote which field."""
    tidy = [_without_managers(found) for found in objects]
    return tidy[0] if one else {"apiVersion": "v1", "kind": "List", "items": tidy}


def json_of(document: JSON) -> str:
    return json.dumps(document, indent=4, allow_nan=False)


def yaml_of(document: JSON) -> str:
    """In ASCII: any terminal can show it, and a control character in it is written as an escape."""
    return yaml.safe_dump(document, default_flow_style=False, allow_unicode=False).rstrip("\n")


def _without_managers(found: JSON) -> JSON:
    metadata = {key: value for key, value in found["metadata"].items() if key != "managedFields"}
    return {**found, "metadata": metadata}
