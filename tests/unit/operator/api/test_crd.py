"""The CRDs in crds/ are what the models say, and are structural in the Kubernetes sense."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from mlora_operator.api import crd
from tests.fixtures.pod_fields import is_of_a_pod

REPOSITORY = Path(__file__).parents[4]
CRDS = {"LoRATask": crd.task_crd(), "LoRAPipeline": crd.pipeline_crd()}


def version_of(definition: dict[str, Any]) -> dict[str, Any]:
    (version,) = definition["spec"]["versions"]
    return version  # type: ignore[no-any-return]


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema node with its field path."""
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    if "items" in schema:
        yield from nodes(schema["items"], f"{path}[]")
    if "additionalProperties" in schema:
        yield from nodes(schema["additionalProperties"], f"{path}{{}}")


EVERY_NODE = [
    (f"{kind}{path}", node)
    for kind, definition in CRDS.items()
    for path, node in nodes(version_of(definition)["schema"]["openAPIV3Schema"])
]
ALL_NODES = [(path, node) for path, node in EVERY_NODE if not is_of_a_pod(path)]


@pytest.mark.parametrize("folder", crd.COPIES)
def test_the_files_in_the_repository_are_up_to_date(folder: str) -> None:
    on_disk = {path.name: path.read_text(encoding="utf-8") for path in (REPOSITORY / folder).glob("*.yaml")}
    assert on_disk == crd.files(), f"run `python -m mlora_operator.api.crd {' '.join(crd.COPIES)}`"


def test_the_files_parse_to_the_definitions() -> None:
    assert [yaml.safe_load(content) for content in crd.files().values()] == list(CRDS.values())


def test_main_writes_both_files_into_each_folder(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b" / "c"]
    assert crd.main([str(folder) for folder in folders]) == 0
    for folder in folders:
        assert {path.name: path.read_text() for path in folder.iterdir()} == crd.files()


def test_main_without_a_directory_says_how_it_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    assert crd.main([]) == 2
    assert "DIRECTORY" in capsys.readouterr().err


def test_every_node_has_a_type_and_nothing_that_a_structural_schema_forbids() -> None:
    allowed = {
        *("type", "description", "enum", "pattern", "minLength", "maxLength", "minItems", "maxItems"),
        "maxProperties",
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "default", "format"),
        *("properties", "required", "items", "additionalProperties"),
        *("x-kubernetes-validations", "x-kubernetes-int-or-string"),
        *("x-kubernetes-list-type", "x-kubernetes-list-map-keys"),
    }
    for path, node in EVERY_NODE:
        assert ("type" in node) is not ("x-kubernetes-int-or-string" in node), path
        assert set(node) <= allowed, path
        assert not ("properties" in node and "additionalProperties" in node), path
        for exclusive in ("exclusiveMinimum", "exclusiveMaximum"):
            assert node.get(exclusive, True) is True, path


def test_every_field_has_a_description_for_kubectl_explain() -> None:
    silent = [
        path
        for path, node in ALL_NODES
        if "description" not in node and not path.endswith((".metadata", "[]", "{}"))
    ]
    assert silent == []


def test_every_number_in_a_spec_is_a_number_with_bounds() -> None:
    unbounded = [
        path
        for path, node in ALL_NODES
        if ".spec" in path
        and node.get("type") in ("integer", "number")
        and not {"minimum", "maximum"} <= set(node)
    ]
    assert unbounded == []


def test_every_free_text_that_a_cel_rule_compares_is_bounded() -> None:
    unbounded = [
        path
        for path, node in ALL_NODES
        if path.startswith("LoRATask.spec")
        and node.get("type") == "string"
        and not {"maxLength", "enum"} & set(node)
    ]
    assert unbounded == []


def test_defaults_reach_below_absent_objects_and_never_invent_a_required_one() -> None:
    spec = version_of(CRDS["LoRATask"])["schema"]["openAPIV3Schema"]["properties"]["spec"]
    assert spec["required"] == ["baseModel", "dataset", "output"]
    training = spec["properties"]["training"]
    filled = {name: field["default"] for name, field in training["properties"].items() if "default" in field}
    assert training["default"] == filled
    assert spec["properties"]["training"]["properties"]["learningRate"]["default"] == 0.0002
    assert "default" not in spec["properties"]["dataset"]
    assert "default" not in spec["properties"]["storage"]["properties"]["secretRef"]


def test_a_status_has_no_defaults() -> None:
    assert [path for path, node in ALL_NODES if ".status" in path and "default" in node] == []


def test_pod_fields_have_the_shapes_that_a_pod_has() -> None:
    spec = version_of(CRDS["LoRAPipeline"])["schema"]["openAPIV3Schema"]["properties"]["spec"]
    worker = spec["properties"]["worker"]["properties"]
    assert worker["affinity"]["properties"].keys() == {"nodeAffinity", "podAffinity", "podAntiAffinity"}
    assert worker["tolerations"]["items"]["properties"]["operator"] == {"type": "string"}
    assert worker["resources"]["properties"]["limits"]["additionalProperties"] == {
        "x-kubernetes-int-or-string": True
    }
    assert worker["env"]["items"]["required"] == ["name"]
    assert not any("x-kubernetes-preserve-unknown-fields" in node for _, node in EVERY_NODE)
    assert worker["nodeSelector"]["additionalProperties"] == {"type": "string", "maxLength": 63}


def test_conditions_are_a_map_by_type() -> None:
    for definition in CRDS.values():
        status = version_of(definition)["schema"]["openAPIV3Schema"]["properties"]["status"]
        assert status["properties"]["conditions"]["x-kubernetes-list-map-keys"] == ["type"]


def test_names_and_columns() -> None:
    names = {kind: definition["spec"]["names"] for kind, definition in CRDS.items()}
    assert {kind: (n["plural"], n["shortNames"], n["categories"]) for kind, n in names.items()} == {
        "LoRATask": ("loratasks", ["lt"], ["mlora"]),
        "LoRAPipeline": ("lorapipelines", ["lp"], ["mlora"]),
    }
    columns = version_of(CRDS["LoRATask"])["additionalPrinterColumns"]
    narrow = [column["name"] for column in columns if column.get("priority", 0) == 0]
    wide = [column["name"] for column in columns if column.get("priority", 0) == 1]
    assert narrow == ["State", "Reason", "Priority", "Progress", "Loss", "ETA", "Age"]
    assert wide == ["Base Model", "Pipeline", "Tokens/s", "Adapter"]


@pytest.mark.parametrize("kind", CRDS)
def test_every_printed_column_exists_in_the_schema(kind: str) -> None:
    version = version_of(CRDS[kind])
    for column in version["additionalPrinterColumns"]:
        place = version["schema"]["openAPIV3Schema"]
        path = column["jsonPath"].split("[?")[0].strip(".").split(".")
        if path[0] == "metadata":
            continue
        for name in path:
            place = place["properties"][name]


def test_no_bound_between_two_whole_numbers_refuses_the_one_below_it() -> None:
    """The API server rounds bounds towards zero for values written as whole numbers: 0 is not "less than 0.5" there."""
    fractional = [
        path
        for path, node in ALL_NODES
        if node.get("exclusiveMaximum") and not float(node["maximum"]).is_integer()
    ]
    assert fractional == []
    spec = crd.task_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    smoothing = spec["properties"]["training"]["properties"]["objective"]["properties"]["labelSmoothing"]
    assert [rule["rule"] for rule in smoothing["x-kubernetes-validations"]] == ["self < 0.5"]
