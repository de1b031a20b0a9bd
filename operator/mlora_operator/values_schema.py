"""The generated part of the chart's values.schema.json: what a catalogue entry may say.

``python -m mlora_operator.values_schema charts/mlora-operator/values.schema.json`` rewrites ``definitions``
from the models that the operator parses its settings with, and leaves the rest, which is written by hand.
So Helm refuses at install time what the operator would refuse at its start.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from mlora_operator.settings import CatalogueModel

INT_OR_STRING = "x-kubernetes-int-or-string"
# A catalogue entry says these for itself; the others it may take over from pipelineDefaults.
_OWN = ("name", "uri", "revision")


def definitions() -> dict[str, Any]:
    """JSON Schema of an entry of ``models``, of ``pipelineDefaults``, and of their parts."""
    entry = CatalogueModel.model_json_schema(by_alias=True, ref_template="#/definitions/{model}")
    parts = entry.pop("$defs", {})
    defaults = {
        "title": "PipelineDefaults",
        "type": "object",
        "description": "Defaults of the catalogue's pipelines.",
        "additionalProperties": False,
        "properties": {name: part for name, part in entry["properties"].items() if name not in _OWN},
    }
    made: dict[str, Any] = _numbers_too({**parts, "CatalogueModel": entry, "PipelineDefaults": defaults})
    return made


def _numbers_too(node: Any) -> Any:
    """Quantities may be numbers, which a structural schema says in a word of its own."""
    if isinstance(node, list):
        return [_numbers_too(one) for one in node]
    if not isinstance(node, dict):
        return node
    made = {key: _numbers_too(value) for key, value in node.items()}
    return made | {"type": ["string", "integer"]} if made.pop(INT_OR_STRING, False) is True else made


def rewritten(text: str) -> str:
    """The schema file's ``text`` with fresh definitions."""
    return json.dumps({**json.loads(text), "definitions": definitions()}, indent=2) + "\n"


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m mlora_operator.values_schema FILE", file=sys.stderr)
        return 2
    file = Path(arguments[0])
    file.write_text(rewritten(file.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
