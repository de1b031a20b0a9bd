"""From a pydantic model to the structural OpenAPI v3 schema that a CustomResourceDefinition wants.

Kubernetes takes a subset of JSON Schema: no ``$ref``, no ``anyOf`` with null, no ``additionalProperties:
false`` (unknown fields are pruned, or refused by kubectl's strict validation), and the bounds of OpenAPI
3.0, where ``exclusiveMinimum`` is a boolean beside ``minimum``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any

from pydantic import BaseModel

from mlora_operator.api.pod_parts import SHAPE, shape
from mlora_operator.api.rule import Rule
from mlora_operator.api.rules import looks_like

JSON = dict[str, Any]

_KEPT = (
    "type",
    "description",
    "enum",
    "pattern",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "maxProperties",
    "minimum",
    "maximum",
    "format",
)


def structural(model: type[BaseModel], *, defaults: bool) -> JSON:
    """The structural schema of ``model``.

    ``defaults`` True fills in what the user left out, also below an absent object, so that the stored
    object shows every value in use and CEL rules may rely on it. A status gets none: the operator writes
    what it knows.
    """
    document = model.model_json_schema(by_alias=True, mode="validation")
    return _convert(document, document.get("$defs", {}), defaults)


def with_rules(schema: JSON, rules: Iterable[Rule]) -> JSON:
    """``schema`` with each rule added at its path. Raises KeyError when the schema has no such path."""
    for rule in rules:
        place = schema
        for name in rule.path:
            place = place["properties"][name]
        place.setdefault("x-kubernetes-validations", []).append(rule.to_cel())
    return schema


def _convert(node: Mapping[str, Any], definitions: Mapping[str, JSON], defaults: bool) -> JSON:
    node = _resolved(node, definitions)
    schema: JSON = {key: node[key] for key in _KEPT if key in node}
    if SHAPE in node:
        schema |= deepcopy(shape(node[SHAPE]))
        if defaults and node.get("default") is not None:
            schema["default"] = node["default"]
        return _atomic_lists(schema)
    if defaults and "pattern" in schema:  # of a spec: a rule says in words what a pattern does not
        schema["x-kubernetes-validations"] = [looks_like(schema.pop("pattern")).to_cel()]
    if node.get("x-kubernetes-int-or-string"):
        del schema["type"]
        schema["x-kubernetes-int-or-string"] = True
    if "const" in node:
        schema["enum"] = [node["const"]]
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if exclusive in node:
            schema |= {bound: node[exclusive], exclusive: True}
    if schema.get("exclusiveMaximum") and not float(schema["maximum"]).is_integer():
        schema.setdefault("x-kubernetes-validations", []).append(_below(schema["maximum"]).to_cel())
        schema["maximum"] = math.ceil(schema["maximum"])
    schema |= {bound: _plain(schema[bound]) for bound in ("minimum", "maximum") if bound in schema}
    if "description" in schema:
        schema["description"] = " ".join(schema["description"].split())
    if defaults and node.get("default") is not None:
        schema["default"] = _plain(node["default"])

    if node.get("type") == "array":
        schema["items"] = _convert(node["items"], definitions, defaults)
        schema["x-kubernetes-list-type"] = "atomic"  # who applies a list means the whole list
    if node.get("type") == "object":
        schema |= _object(node, definitions, defaults)
    return schema


def _atomic_lists(schema: JSON) -> JSON:
    """Whoever applies a list means the whole list."""
    if schema.get("type") == "array":
        schema["x-kubernetes-list-type"] = "atomic"
        _atomic_lists(schema["items"])
    for child in (*schema.get("properties", {}).values(), schema.get("additionalProperties")):
        if child is not None:
            _atomic_lists(child)
    return schema


def _object(node: Mapping[str, Any], definitions: Mapping[str, JSON], defaults: bool) -> JSON:
    if "properties" not in node:
        values = node.get("additionalProperties", True)
        if values is True:
            return {"x-kubernetes-preserve-unknown-fields": True}
        made = {"additionalProperties": _convert(values, definitions, defaults)}
        names = _resolved(node.get("propertyNames", {}), definitions)
        return made | (
            {"x-kubernetes-validations": [_names(names)]} if defaults and "maxLength" in names else {}
        )
    required = node.get("required", [])
    properties: JSON = {}
    for name, child in node["properties"].items():
        converted = _convert(child, definitions, defaults)
        # An object that can be made from defaults alone is made, so that its defaults apply. It is written out:
        # the API server runs CEL rules on the default itself, before it fills in what stands below.
        fillable = "properties" in converted and "required" not in converted and not _nullable(child)
        if defaults and name not in required and fillable:
            below = converted["properties"].items()
            converted["default"] = {
                key: deepcopy(value["default"]) for key, value in below if "default" in value
            }
        properties[name] = converted
    return {"properties": properties} | ({"required": sorted(required)} if required else {})


def _below(most: float) -> Rule:
    """For a value that is written as a whole number the API server rounds the bound towards zero, and 0 were not less than
    0.5: the schema's own bound is the next whole number."""
    return Rule(path=(), cel=f"self < {most!r}", message=f"must be less than {most!r}")


def _names(names: Mapping[str, Any]) -> JSON:
    """The rule for the names of a map, for which there is no word in a structural schema."""
    least, most = names.get("minLength", 0), names["maxLength"]
    longer = f"size(name) >= {least} && " if least else ""
    rule = Rule(
        path=(),
        cel=f"self.all(name, {longer}size(name) <= {most})",
        message=f"names must have {least} to {most} characters"
        if least
        else f"names must have at most {most} characters",
    )
    return rule.to_cel()


def _resolved(node: Mapping[str, Any], definitions: Mapping[str, JSON]) -> Mapping[str, Any]:
    """``node`` without reference and null alternative; what stands at the field wins over the type's."""
    if _nullable(node):
        (alternative,) = (branch for branch in node["anyOf"] if branch.get("type") != "null")
        rest = {key: value for key, value in node.items() if key != "anyOf"}
        return _resolved({**alternative, **rest}, definitions)
    if "$ref" in node:
        target = definitions[node["$ref"].rsplit("/", 1)[-1]]
        return _resolved({**target, **{k: v for k, v in node.items() if k != "$ref"}}, definitions)
    return node


def _nullable(node: Mapping[str, Any]) -> bool:
    return any(branch.get("type") == "null" for branch in node.get("anyOf", ()))


def _plain(value: Any) -> Any:
    """Whole floats as integers, as the API server prints them; 1.0 and 1 are one number in JSON."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
