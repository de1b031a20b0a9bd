"""What users wrote for a release is taken by every later one, for as long as its API version is served."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from mlora_operator.api import crd
from mlora_operator.local.manifests import read_manifests
from tests.unit.operator.api.test_manifests_against_schema import spec_schema

ROOT = Path(__file__).parents[4]
RELEASES = ROOT / "tests" / "fixtures" / "releases"
FILES = sorted(RELEASES.glob("*/*.yaml"))
SCHEMAS = {"LoRATask": spec_schema(crd.task_crd()), "LoRAPipeline": spec_schema(crd.pipeline_crd())}
# Of the release that is being made; kustomize's overlay is a patch, and no object.
KEPT = {
    "quickstart.yaml": "quickstart.yaml",
    "pipeline.yaml": "pipeline.yaml",
    "preference.yaml": "preference.yaml",
    "ci/task.yaml": "ci-task.yaml",
    "kustomize/base/tasks.yaml": "kustomize-tasks.yaml",
    "kustomize/base/pipeline.yaml": "kustomize-pipeline.yaml",
}


def objects(path: Path) -> Iterator[dict[str, Any]]:
    yield from (one for one in yaml.safe_load_all(path.read_text()) if one["kind"] in SCHEMAS)


def named(path: Path) -> str:
    return str(path.relative_to(RELEASES))


@pytest.mark.parametrize("path", FILES, ids=named)
def test_the_command_and_the_operator_take_it(path: Path) -> None:
    read = read_manifests([(path.name, path.read_text())])
    assert [str(one) for one in read.problems] == []
    assert len(read.tasks) + len(read.pipelines) == len(list(objects(path))) > 0


@pytest.mark.parametrize("path", FILES, ids=named)
def test_the_schema_takes_it(path: Path) -> None:
    for one in objects(path):
        jsonschema.Draft4Validator(SCHEMAS[one["kind"]]).validate(one["spec"])


def test_every_example_of_the_present_release_is_kept() -> None:
    examples = ROOT / "examples"
    ours = {
        str(path.relative_to(examples))
        for path in examples.rglob("*.yaml")
        if path.read_text().startswith("apiVersion: mlora.dev/")
        or "\napiVersion: mlora.dev/" in path.read_text()
    }
    assert ours - {"kustomize/overlays/prod/task.yaml"} == set(KEPT)
    assert {path.parent.name for path in FILES} >= {"0.1.0"}
    assert set(KEPT.values()) <= {path.name for path in FILES if path.parent.name == "0.1.0"}
