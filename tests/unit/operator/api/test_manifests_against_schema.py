"""Good and bad manifests against the schema in the CRD, and against the pydantic model: both say the same."""

from __future__ import annotations

import copy
import re
from typing import Any

import jsonschema
import pytest
from pydantic import BaseModel, ValidationError

from mlora_operator.api import crd
from mlora_operator.api.pipeline import LoRAPipelineSpec
from mlora_operator.api.task import LoRATaskSpec

TASK: dict[str, Any] = {
    "baseModel": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "priority": 10,
    "lora": {"rank": 16, "alpha": 32, "dropout": 0.05, "targetModules": ["q_proj", "v_proj"]},
    "dataset": {"uri": "s3://datasets/gsm8k/train.jsonl", "fields": {"prompt": "question"}},
    "training": {"batchSize": 8, "learningRate": 0.0001, "maxSteps": 1_000_000},
    "output": {"uri": "s3://adapters/team-a/support-bot"},
    "storage": {"endpoint": "http://s3.storage:8333", "secretRef": {"name": "s3-credentials"}},
}
PIPELINE: dict[str, Any] = {
    "model": {"name": "m", "uri": "s3://models/m"},
    "stages": 2,
    "memory": {"budget": "20Gi", "margin": 0.05},
    "idleTimeout": "1h30m",
    "worker": {"resources": {"limits": {"nvidia.com/gpu": 1}}, "tolerations": [{"key": "gpu"}]},
}


def spec_schema(definition: dict[str, Any]) -> dict[str, Any]:
    (version,) = definition["spec"]["versions"]
    return to_draft_4(version["schema"]["openAPIV3Schema"]["properties"]["spec"])


def to_draft_4(schema: dict[str, Any]) -> dict[str, Any]:
    """Draft 4 has the boolean exclusiveMinimum; unknown fields are refused, as by kubectl."""
    schema = copy.deepcopy(schema)
    stack = [schema]
    while stack:
        node = stack.pop()
        if "properties" in node:
            node["additionalProperties"] = False
            stack += node["properties"].values()
        if "items" in node:
            stack.append(node["items"])
        for rule in node.get("x-kubernetes-validations", ()):  # as JSON Schema says it
            match = re.fullmatch(r"(?:self|string\(self\))\.matches\(r'(.*)'\)", rule["rule"])
            if match is not None:
                node["pattern"] = match[1]
    return schema


KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], type[BaseModel]]] = {
    "task": (TASK, spec_schema(crd.task_crd()), LoRATaskSpec),
    "pipeline": (PIPELINE, spec_schema(crd.pipeline_crd()), LoRAPipelineSpec),
}


def changed(spec: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    spec = copy.deepcopy(spec)
    *parents, last = path.split(".")
    place = spec
    for name in parents:
        place = place.setdefault(name, {})
    place[last] = value
    return spec


@pytest.mark.parametrize("kind", KINDS)
def test_a_good_spec_is_accepted_by_both(kind: str) -> None:
    spec, schema, model = KINDS[kind]
    jsonschema.Draft4Validator(schema).validate(spec)
    model.model_validate(spec)


BAD = [
    ("pipeline", "scheduling.weights", {"team-a": "1"}),
    ("pipeline", "scheduling.weights", {"team-a": True}),
    ("task", "training.learningRate", "1e-4"),
    ("task", "training.learningRate", 0),
    ("task", "training.learningRate", -0.1),
    ("task", "training.learningRate", True),
    ("task", "training.maxSteps", "1e+06"),
    ("task", "training.maxSteps", 0),
    ("task", "training.batchSize", 0),
    ("task", "training.batchSize", 1.5),
    ("task", "training.epochs", 0),
    ("task", "training.seed", -1),
    ("task", "training.maxSeqLength", 1),
    ("task", "training.schedule", "cosin"),
    ("task", "training.overlong", "drop"),
    ("task", "training.learning_rates", 0.1),
    ("task", "lora.rank", 0),
    ("task", "lora.rank", True),
    ("task", "lora.rank", "16"),
    ("task", "lora.rank", 513),
    ("task", "lora.alpha", 0),
    ("task", "lora.alpha", -16),
    ("task", "lora.dropout", 1),
    ("task", "lora.dropout", -0.1),
    ("task", "lora.targetModules", ["q_proj"] * 65),
    ("task", "lora.targetParameters", "experts.down_proj"),
    ("task", "lora.targetModules", "all-linear"),
    ("task", "lora.targetModules", [""]),
    ("task", "dataset.uri", "/tmp/train.jsonl"),
    ("task", "dataset.format", "parquet"),
    ("task", "output.uri", "adapters/a"),
    ("task", "storage.endpoint", "s3.storage:8333"),
    ("task", "storage.secretRef", {}),
    ("task", "suspend", "yes"),
    ("task", "priority", 1.5),
    ("task", "priority", 1_000_001),
    ("task", "baseModel", ""),
    ("task", "basemodel", "x"),
    ("pipeline", "stages", 0),
    ("pipeline", "stages", "2"),
    ("pipeline", "model.dtype", "float8"),
    ("pipeline", "model.uri", "HuggingFaceTB/SmolLM2-135M-Instruct"),
    ("pipeline", "memory.budget", "20 GB"),
    ("pipeline", "memory.margin", 1),
    ("pipeline", "memory.margin", "0.05"),
    ("pipeline", "idleTimeout", "ten minutes"),
    ("pipeline", "allowedNamespaces.from", "Some"),
    ("pipeline", "worker.threads", -1),
    ("pipeline", "worker.allowedNetworks", ["10.0.0.0/33"]),
    ("pipeline", "worker.allowedNetworks", ["10.0.0"]),
    ("pipeline", "worker.allowedNetworks", ["10.0.0.256/8"]),
    ("pipeline", "worker.allowedNetworks", ["fd00::/129"]),
    ("pipeline", "worker.allowedNetworks", ["intranet"]),
    ("pipeline", "worker.imagePullPolicy", "Sometimes"),
]


@pytest.mark.parametrize(("kind", "path", "value"), BAD)
def test_a_bad_value_is_refused_by_both_at_its_own_path(kind: str, path: str, value: Any) -> None:
    good, schema, model = KINDS[kind]
    spec = changed(good, path, value)

    errors = list(jsonschema.Draft4Validator(schema).iter_errors(spec))
    assert errors
    for error in errors:
        where = ".".join(str(part) for part in error.absolute_path)
        assert path.startswith(where) or where.startswith(path)

    with pytest.raises(ValidationError) as caught:
        model.model_validate(spec)
    assert ".".join(str(part) for part in caught.value.errors()[0]["loc"]).startswith(path)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("10.0.0.0/8", "10.0.0.0/8"),
        ("10.1.2.3/8", "10.0.0.0/8"),
        ("127.0.0.1", "127.0.0.1/32"),
        ("0.0.0.0/0", "0.0.0.0/0"),
        ("::/0", "::/0"),
        ("fe80::1/64", "fe80::/64"),
    ],
)
def test_a_network_may_be_written_by_any_address_in_it(written: str, meant: str) -> None:
    _, schema, _ = KINDS["pipeline"]
    spec = changed(PIPELINE, "worker.allowedNetworks", [written])
    jsonschema.Draft4Validator(schema).validate(spec)
    assert LoRAPipelineSpec.model_validate(spec).worker.allowed_networks == (meant,)


@pytest.mark.parametrize("missing", ["baseModel", "dataset", "output"])
def test_what_is_required_is_required_by_both(missing: str) -> None:
    spec = {name: value for name, value in TASK.items() if name != missing}
    _, schema, model = KINDS["task"]
    assert list(jsonschema.Draft4Validator(schema).iter_errors(spec))
    with pytest.raises(ValidationError):
        model.model_validate(spec)
