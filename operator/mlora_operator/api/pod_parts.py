"""Parts of a pod that a pipeline passes on: held against Kubernetes' own shapes, so that a misspelt field is an error.

The shapes are in ``pod_shapes.json`` (``mlora_operator.pod_shapes`` writes it). Values beyond their types are the API
server's to judge, when the StatefulSet is made. Pure but for reading that file once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Annotated, Any

from pydantic import AfterValidator, WithJsonSchema

from mlora_operator.api.bounded import bounded
from mlora_operator.api.suggestions import unknown_field

JSON = dict[str, Any]
SHAPE = "x-pod-part"  # names the shape in a JSON schema of pydantic's
_TYPES: Mapping[str, tuple[tuple[type, ...], str]] = {
    "string": ((str,), "must be text; put it in quotes"),
    "integer": ((int,), "must be a whole number"),
    "number": ((int, float), "must be a number"),
    "boolean": ((bool,), "must be true or false"),
    "array": ((list, tuple), "must be a list"),
    "object": ((dict,), "must be a mapping"),
}


@cache
def _shapes() -> Mapping[str, JSON]:
    found: Mapping[str, JSON] = json.loads(
        (files("mlora_operator.api") / "pod_shapes.json").read_text("utf-8")
    )
    return found


def shape(name: str) -> JSON:
    """The structural schema of a part, by its name there."""
    return _shapes()[name]


def pod_part(name: str) -> Any:
    """The type of a part, for an annotation."""

    def checked(value: JSON) -> JSON:
        problem = misfit(value, shape(name))
        if problem is not None:
            raise ValueError(problem)
        return value

    return Annotated[
        dict[str, Any],
        AfterValidator(bounded),
        AfterValidator(checked),
        WithJsonSchema({"type": "object", SHAPE: name}),
    ]


def misfit(value: object, wanted: Mapping[str, Any], path: str = "") -> str | None:
    """The first thing in ``value`` that ``wanted`` does not know, with its path; None when there is none. What is null is
    as if it were not there."""
    at = f"{path}: " if path else ""
    if value is None:
        return None
    if wanted.get("x-kubernetes-int-or-string"):
        good = isinstance(value, str | int) and not isinstance(value, bool)
        return None if good else f"{at}must be a quantity such as 2, 500m or 20Gi"
    types, words = _TYPES[wanted["type"]]
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        return f"{at}{words}"
    if isinstance(value, list | tuple):
        found = (misfit(one, wanted["items"], f"{path}[{index}]") for index, one in enumerate(value))
        return next((problem for problem in found if problem is not None), None)
    if not isinstance(value, dict):
        return None
    properties = wanted.get("properties")
    for key, inner in value.items():
        below = f"{path}.{key}" if path else str(key)
        if properties is not None and key not in properties:
            return f"{below}: {unknown_field(key, properties)}"
        problem = misfit(
            inner, wanted["additionalProperties"] if properties is None else properties[key], below
        )
        if problem is not None:
            return problem
    missing = next((name for name in wanted.get("required", ()) if value.get(name) is None), None)
    return None if missing is None else f"{at}{missing} is missing"
