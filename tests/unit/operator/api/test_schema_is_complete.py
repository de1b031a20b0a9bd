"""Each field of the API: bounded, described, merged as it should be; each refusal with words that say what to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from mlora_operator.api import crd
from mlora_operator.api.pipeline import LoRAPipelineSpec
from mlora_operator.api.problem import describe
from mlora_operator.api.rules import REFUSALS, looks_like
from tests.fixtures.pod_fields import is_of_a_pod


def walk(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from walk(child, f"{path}.{name}")
    if "items" in schema:
        yield from walk(schema["items"], f"{path}[]")
    if "additionalProperties" in schema:
        yield from walk(schema["additionalProperties"], f"{path}{{}}")


def nodes(part: str) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for definition in (crd.task_crd(), crd.pipeline_crd()):
        (version,) = definition["spec"]["versions"]
        root = version["schema"]["openAPIV3Schema"]["properties"][part]
        found += list(walk(root, f"{definition['spec']['names']['kind']}.{part}"))
    return found


WITH_PODS, STATUSES = nodes("spec"), nodes("status")
SPECS = [(path, node) for path, node in WITH_PODS if not is_of_a_pod(path)]
BOUNDS = {
    "string": ({"maxLength"}, {"enum"}),
    "integer": ({"minimum", "maximum"},),
    "number": ({"minimum", "maximum"},),
    "array": ({"maxItems", "x-kubernetes-list-type"},),
}


def test_everything_that_a_user_writes_is_bounded() -> None:
    """Without a bound, a rule's cost is not known and one object may fill the store."""
    loose = [
        path
        for path, node in SPECS
        if node.get("type", "string") in BOUNDS
        and not any(bound <= set(node) for bound in BOUNDS[node.get("type", "string")])
    ]
    loose += [path for path, node in SPECS if "additionalProperties" in node and "maxProperties" not in node]
    assert loose == []


def test_every_list_says_how_it_is_merged() -> None:
    lists = [(path, node) for path, node in WITH_PODS + STATUSES if node.get("type") == "array"]
    assert lists
    assert [path for path, node in lists if "x-kubernetes-list-type" not in node] == []


def test_every_text_of_a_few_words_lists_them() -> None:
    """A field whose description lists its only values must have them as an enum."""
    said = {
        path: node.get("enum") for path, node in SPECS if path.endswith((".schedule", ".policy", ".from"))
    }
    assert len(said) == 3
    assert all(said.values())


def test_no_refusal_is_a_bare_pattern_and_each_says_what_to_do() -> None:
    assert [path for path, node in SPECS if "pattern" in node] == []
    rules = [(path, rule) for path, node in SPECS for rule in node.get("x-kubernetes-validations", ())]
    assert len(rules) > 20
    telling = ("must", "cannot", "needs", "only", "leave", "has to", "meaning", "remove")
    for path, rule in rules:
        assert any(word in rule["message"] for word in telling), (path, rule["message"])
        assert rule["reason"] in ("FieldValueInvalid", "FieldValueForbidden")


@pytest.mark.parametrize("pattern", REFUSALS)
def test_a_pattern_in_cel_needs_no_escapes(pattern: str) -> None:
    assert "'" not in pattern
    value = "string(self)" if "amount of bytes" in REFUSALS[pattern] else "self"  # a number is one, too
    assert looks_like(pattern).to_cel()["rule"] == f"{value}.matches(r'{pattern}')"


def test_without_a_cluster_the_words_are_the_same() -> None:
    with pytest.raises(ValidationError) as caught:
        LoRAPipelineSpec.model_validate({"model": {"name": "m", "uri": "/models"}, "idleTimeout": "soon"})
    told = describe(caught.value, "spec")
    assert "spec.model.uri: must be a folder such as s3://bucket/prefix" in told
    assert "spec.idleTimeout: must be a duration such as 90s, 10m or 1h30m (got 'soon')" in told
