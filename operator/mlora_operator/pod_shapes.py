"""Shapes of the parts of a pod that a pipeline passes on, from the models of the ``kubernetes`` package.

``python -m mlora_operator.pod_shapes FILE`` writes them to ``api/pod_shapes.json``: the package takes seconds to load, and
``api`` knows nothing of it. A shape is a structural schema without descriptions and bounds.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kubernetes.client import models

JSON = dict[str, Any]
PARTS = {
    "resources": "V1ResourceRequirements",
    "toleration": "V1Toleration",
    "affinity": "V1Affinity",
    "envVar": "V1EnvVar",
    "volume": "V1Volume",
    "volumeMount": "V1VolumeMount",
    "localObjectReference": "V1LocalObjectReference",
}
# Quantities, which the models have as text and Kubernetes takes as numbers, too.
_QUANTITIES = frozenset({"limits", "requests", "capacity", "sizeLimit", "divisor"})
_METADATA = frozenset({"labels", "annotations"})  # of a volume claim's template: the rest is the server's


def shapes() -> JSON:
    made = {}
    for name, model in PARTS.items():
        document = getattr(models, model).model_json_schema(by_alias=True)
        made[name] = _shape(document, document.get("$defs", {}), "")
    return made


def _shape(node: Mapping[str, Any], definitions: Mapping[str, JSON], field: str) -> JSON:
    if "anyOf" in node:
        (node,) = (branch for branch in node["anyOf"] if branch.get("type") != "null")
    if "$ref" in node:
        node = definitions[node["$ref"].rsplit("/", 1)[-1]]
    kind = node.get("type")
    if kind == "array":
        return {"type": "array", "items": _shape(node["items"], definitions, field)}
    if kind == "object" and "properties" in node:
        properties = {
            name: _shape(child, definitions, name)
            for name, child in sorted(node["properties"].items())
            if field != "metadata" or name in _METADATA
        }
        required = sorted(set(node.get("required", ())) & properties.keys())
        return {"type": "object", "properties": properties} | ({"required": required} if required else {})
    if kind == "object":
        return {
            "type": "object",
            "additionalProperties": _shape(node["additionalProperties"], definitions, field),
        }
    if field in _QUANTITIES:
        return {"x-kubernetes-int-or-string": True}
    return {"type": str(kind)}


def written() -> str:
    return json.dumps(shapes(), indent=1, sort_keys=True) + "\n"


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m mlora_operator.pod_shapes FILE", file=sys.stderr)
        return 2
    Path(arguments[0]).write_text(written(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
