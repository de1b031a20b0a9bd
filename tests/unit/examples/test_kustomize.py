"""What Kustomize is told of the two kinds: every field that names another object."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from mlora_operator.api import crd

TOLD = Path(__file__).parents[3] / "examples" / "kustomize" / "base" / "mlora.yaml"


def references(schema: Mapping[str, Any], path: str) -> Iterator[str]:
    """Paths of the names in fields such as secretRef."""
    for name, child in schema.get("properties", {}).items():
        here = f"{path}/{name}"
        if path.endswith("Ref") and name == "name":
            yield here
        yield from references(child, here)


def test_every_reference_of_the_schemas_follows_the_name_of_what_it_names() -> None:
    told = {
        (field["kind"], field["path"])
        for one in yaml.safe_load(TOLD.read_text())["nameReference"]
        for field in one["fieldSpecs"]
    }
    for definition in (crd.task_crd(), crd.pipeline_crd()):
        (version,) = definition["spec"]["versions"]
        spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
        found = set(references(spec, "spec"))
        assert found
        kind = definition["spec"]["names"]["kind"]
        assert found <= {path for one, path in told if one == kind}
