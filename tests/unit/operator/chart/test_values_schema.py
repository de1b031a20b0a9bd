"""Helm refuses at install time what the operator would refuse at its start."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from mlora_operator.values_schema import main, rewritten
from tests.fixtures import helm

from .conftest import CHART

MODEL = {"name": "m", "uri": "s3://models/m"}
FILE = CHART / "values.schema.json"


def validate(chart: helm.Chart, values: dict[str, Any]) -> None:
    chart.validate_schema(chart.merge_values(values))


def test_the_generated_part_is_up_to_date() -> None:
    text = FILE.read_text()
    assert rewritten(text) == text, f"run `python -m mlora_operator.values_schema {FILE.name}`"


def test_main_rewrites_the_generated_part_only(tmp_path: Any) -> None:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps({"title": "kept", "definitions": {"old": {}}}))
    assert main([str(file)]) == 0
    written = json.loads(file.read_text())
    assert written["title"] == "kept"
    assert "old" not in written["definitions"]
    assert main([]) == 2


def test_every_value_has_a_schema_and_a_comment() -> None:
    text = (CHART / "values.yaml").read_text()
    assert set(yaml.safe_load(text)) == set(json.loads(FILE.read_text())["properties"]) - {"global"}


def test_the_comment_above_the_defaults_of_pipelines_shows_each_of_them() -> None:
    text = (CHART / "values.yaml").read_text()
    fields = json.loads(FILE.read_text())["definitions"]["PipelineDefaults"]["properties"]
    assert [name for name in fields if f"\n#   {name}: " not in text] == []


GOOD: dict[str, dict[str, Any]] = {
    "defaults": {},
    "a model": {"models": [MODEL]},
    "a model with all fields": {
        "models": [
            {
                **MODEL,
                "revision": None,
                "dtype": "float32",
                "quantization": {"type": "nf4", "doubleQuantization": False},
                "stages": 3,
                "microbatchTokens": 1_000_000,
                "recomputeActivations": True,
                "idleTimeout": "1h",
                "memory": {"budget": "20Gi", "margin": 0.1},
                "storage": {"endpoint": "http://s3:8333", "secretRef": {"name": "s"}},
                "worker": {"nodeSelector": {"gpu": "a100"}, "env": [{"name": "A", "value": "b"}]},
            }
        ]
    },
    "defaults of pipelines": {"pipelineDefaults": {"stages": 2, "dtype": "float32"}},
}

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown value": ({"modles": []}, "modles"),
    "a model without uri": ({"models": [{"name": "m"}]}, "uri"),
    "a model with a misspelt field": ({"models": [{**MODEL, "stage": 2}]}, "stage"),
    "recomputation as text": ({"models": [{**MODEL, "recomputeActivations": "yes"}]}, "recomputeActivations"),
    "stages as text": ({"models": [{**MODEL, "stages": "2"}]}, "stages"),
    "no stages": ({"pipelineDefaults": {"stages": 0}}, "stages"),
    "a name in the defaults": ({"pipelineDefaults": {"name": "m"}}, "name"),
    "a budget with a space": ({"pipelineDefaults": {"memory": {"budget": "20 Gi"}}}, "budget"),
    "an endpoint without scheme": ({"pipelineDefaults": {"storage": {"endpoint": "s3:8333"}}}, "endpoint"),
    "an unknown log format": ({"log": {"format": "xml"}}, "format"),
    "a port that needs root": ({"health": {"port": 80}}, "port"),
    "a probe that never waits": ({"health": {"maxSilenceSeconds": 0}}, "maxSilenceSeconds"),
    "root": ({"runAsUser": 0}, "runAsUser"),
    "an unknown pull policy": ({"image": {"pullPolicy": "Sometimes"}}, "pullPolicy"),
    "a namespace that serves and is none": ({"serving": {"namespaces": ["Team_A"]}}, "serving"),
    "a prefix that is none": ({"outputs": {"prefixes": {"team-a": ["adapters/team-a"]}}}, "prefixes"),
    "a prefix of no namespace": ({"outputs": {"prefixes": {"Team_A": ["s3://a/b"]}}}, "Team_A"),
    "a bound of priority that is none": ({"priorities": {"default": {"max": "high"}}}, "max"),
    "a bound of another kind": ({"priorities": {"namespaces": {"team-a": {"min": 0}}}}, "min"),
    "a bound of no namespace": ({"priorities": {"namespaces": {"Team_A": {"max": 0}}}}, "Team_A"),
    "a namespace twice": ({"watchNamespaces": ["a", "a"]}, "watchNamespaces"),
}


@pytest.mark.parametrize(
    "file", sorted(CHART.parents[1].glob("examples/*values*.yaml")), ids=lambda file: file.name
)
def test_values_of_the_examples_are_accepted(chart: helm.Chart, file: Any) -> None:
    validate(chart, yaml.safe_load(file.read_text()))


@pytest.mark.parametrize("case", GOOD)
def test_good_values_are_accepted(chart: helm.Chart, case: str) -> None:
    validate(chart, GOOD[case])


@pytest.mark.parametrize("case", BAD)
def test_bad_values_are_refused_by_name(chart: helm.Chart, case: str) -> None:
    values, name = BAD[case]
    with pytest.raises(helm.HelmError, match=name):
        validate(chart, values)
