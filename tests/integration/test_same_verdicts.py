"""`mlora validate` and the API server refuse the same objects: both get the same mutations of every field.

What only one of them can know is no matter of a single object: what other objects say (an output in use, a priority above
what a pipeline takes), and whether what is named exists. Other differences stand in ``EXCEPTIONS``, each with its reason.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kubernetes import client, config

from mlora_operator.api import crd
from mlora_operator.local.manifests import read_manifests
from tests.fixtures.cluster import Cluster
from tests.integration.test_crds import _installed as _installed

pytestmark = pytest.mark.integration

JSON = dict[str, Any]
Path_ = tuple[str, ...]
Ask = Callable[[JSON], str | None]  # why it is refused; None: it is taken

SMALL_TASK: JSON = {
    "baseModel": "m",
    "dataset": {"uri": "s3://rows/a.jsonl"},
    "output": {"uri": "s3://adapters/a"},
}
FULL_TASK: JSON = {
    "baseModel": "m",
    "priority": 1,
    "suspend": True,
    "startDeadlineSeconds": 60,
    "activeDeadlineSeconds": 60,
    "ttlSecondsAfterFinished": 60,
    "lora": {
        "rank": 8, "alpha": 16, "dropout": 0.1, "useDora": False, "targetModules": ["q_proj"], "excludeModules": ["k_proj"],
        "layersToTransform": [0], "rankPattern": {"q_proj": 4}, "alphaPattern": {"q_proj": 4.5},
        "useRslora": True, "initLoraWeights": "gaussian", "loraplusLrRatio": 4.5,
    },
    "dataset": {
        "uris": ["s3://rows/a.jsonl", "https://host/b.csv"], "format": "alpaca", "fileFormat": "jsonl",
        "fields": {"instruction": "a", "input": "b", "output": "c", "system": "d", "weight": "w"},
        "trainOn": "lastAnswer", "chatTemplate": "x", "split": "train", "limit": 5, "shuffleSeed": 1,
        "heldOut": 0.1,
    },
    "training": {"batchSize": 2, "maxSteps": 10, "warmupSteps": 2, "overlong": "skip", "schedule": "linear",
                 "optimizer": {"type": "lion", "beta1": 0.8, "beta2": 0.9}},
    "evaluation": {"everySteps": 5, "limit": 3, "earlyStopping": {"patience": 2}, "keepBest": True},
    "initFrom": {"uri": "s3://adapters/b"},
    "output": {"uri": "s3://adapters/a", "dtype": "float16", "overwrite": True, "baseModelName": "n"},
    "storage": {
        "endpoint": "https://s3.example.org:9000", "region": "eu-west-1", "addressing": "path",
        "checksums": "whenRequired", "serverSideEncryption": "aws:kms", "kmsKeyId": "alias/a",
        "secretRef": {"name": "keys"},
    },
}  # fmt: skip
# Rules look at fields together: each kind of adapter, optimizer and objective has others that it refuses.
DORA_TASK: JSON = {
    **SMALL_TASK,
    "lora": {"useDora": True, "useRslora": True, "loraplusLrRatio": 16.0, "rankPattern": {"q_proj": 4}},
    "training": {
        "optimizer": {"type": "adamw", "beta1": 0.8, "beta2": 0.99, "epsilon": 1e-7},
        "warmupRatio": 0.1,
    },
}
VERA_TASK: JSON = {
    **SMALL_TASK,
    "lora": {"type": "vera", "rank": 256, "dInitial": 0.2, "dropout": 0.1, "targetModules": ["q_proj"]},
}
DPO_TASK: JSON = {
    **SMALL_TASK,
    "dataset": {
        "uri": "s3://rows/a.jsonl",
        "format": "preference",
        "fields": {"chosen": "a", "rejected": "b"},
    },
    "training": {"objective": {"type": "dpo", "beta": 0.2, "lossType": "ipo"}, "batchSize": 2},
    "evaluation": {"uri": "s3://rows/b.jsonl"},
}
SIMPO_TASK: JSON = {
    **SMALL_TASK,
    "dataset": {"uri": "s3://rows/a.jsonl"},
    "training": {"objective": {"type": "simpo", "beta": 2.0, "simpoGamma": 0.5}},
}
SMALL_PIPELINE: JSON = {"model": {"name": "m", "uri": "s3://models/m"}}
FULL_PIPELINE: JSON = {
    "model": {"name": "m", "uri": "hf://owner/name", "revision": "main", "dtype": "float32"},
    "stages": 2,
    "memory": {"budget": "20Gi", "margin": 0.1},
    "replicas": {"min": 1, "max": 2, "tasksPerReplica": 3},
    "allowedNamespaces": {"from": "Selector", "selector": {"team": "a"}},
    "scheduling": {"policy": "fairShare"},
    "namespaceLimits": {"waiting": 5, "training": 2},
    "checkpoints": {"uri": "s3://checkpoints/p"},
    "storage": {"endpoint": "https://s3.example.org", "secretRef": {"name": "keys"}},
    "worker": {
        "image": "i", "env": [{"name": "A", "value": "b"}], "modelCache": "1Gi",
        "allowedNetworks": ["10.0.0.0/8"], "nodeSelector": {"a": "b"},
    },
}  # fmt: skip
QUANTISED_PIPELINE: JSON = {
    "model": {
        "name": "m", "uri": "s3://models/m", "dtype": "bfloat16",
        "quantization": {"type": "nf4", "doubleQuantization": True},
    },
    "worker": {"threads": 2},
}  # fmt: skip
BASES = {
    "small task": ("LoRATask", SMALL_TASK),
    "full task": ("LoRATask", FULL_TASK),
    "DoRA task": ("LoRATask", DORA_TASK),
    "VeRA task": ("LoRATask", VERA_TASK),
    "DPO task": ("LoRATask", DPO_TASK),
    "SimPO task": ("LoRATask", SIMPO_TASK),
    "small pipeline": ("LoRAPipeline", SMALL_PIPELINE),
    "full pipeline": ("LoRAPipeline", FULL_PIPELINE),
    "quantised pipeline": ("LoRAPipeline", QUANTISED_PIPELINE),
}
# Fields whose verdicts differ, with the reason: nothing at present.
EXCEPTIONS: dict[tuple[str, str], str] = {}
WRONG: dict[str, list[Any]] = {
    "string": [5, True, [], {}],
    "integer": ["1", 1.5, True, [], {}],
    "number": ["1", True, [], {}],
    "boolean": ["true", 1, []],
    "array": ["x", {}, 1],
    "object": ["x", [], 1],
}


def schema_of(kind: str) -> JSON:
    definition = crd.task_crd() if kind == "LoRATask" else crd.pipeline_crd()
    (version,) = definition["spec"]["versions"]
    spec: JSON = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    return spec


def fields_of(schema: JSON, path: Path_ = ()) -> Iterator[tuple[Path_, JSON]]:
    """Every field of every object, but what Kubernetes' own types have within them."""
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        if path[:1] == ("worker",) and len(path) >= 2:
            continue
        yield from fields_of(inner, (*path, name))


def values_of(schema: JSON) -> Iterator[Any]:
    """Of other types, at bounds and beyond."""
    yield None
    kind = schema.get("type", "")
    yield from WRONG.get(kind, ())
    if "enum" in schema:
        yield from (*schema["enum"], "nonsense", "")
    elif kind == "string":
        longest, shortest = schema.get("maxLength"), schema.get("minLength", 0)
        for length in {0, shortest, max(0, shortest - 1), *([longest, longest + 1] if longest else ())}:
            yield "a" * length
        yield from (" ", "a b", "ä", "a\n", "../x", "s3://b/" + "k" * 1500, "1e3", "-1")
    if kind in ("integer", "number"):
        low, high = schema.get("minimum"), schema.get("maximum")
        step = 1 if kind == "integer" else 1e-9
        for bound, beyond in ((low, -step), (high, step)):
            if bound is not None:
                yield from (bound, bound + beyond, bound - beyond)
        # Not 1.0 for a whole number: the API server takes it, but where a rule compares the field.
        yield from (0, -1, 2**31, 2**63, -(2**63) - 1, 1e300)
    if kind == "array":
        item = {"integer": 1, "number": 1}.get(schema.get("items", {}).get("type", ""), "a")
        for count in {0, schema.get("minItems", 0), schema.get("maxItems", 3), schema.get("maxItems", 3) + 1}:
            yield [item] * count
        yield from ([None], [[]], [{}], [True], ["a b"])
    if kind == "object" and "additionalProperties" in schema:
        yield from ({"a": None}, {"a": 1}, {"a": "1"}, {"": 1}, {"a" * 300: 1}, {"a": True}, {"a": []})
        yield from ({"a" * 400: "x"}, {"a" * 400: 2.5})
    if kind == "object" and "properties" in schema:
        yield from ({}, {"zzUnknown": 1})


def mutations(base: JSON, schema: JSON) -> Iterator[tuple[Path_, JSON]]:
    """Where, and the whole changed spec."""
    for path, field in fields_of(schema):
        if not path:
            yield path, {**base, "zzUnknown": 1}
            continue
        dropped = copy.deepcopy(base)
        if _at(dropped, path[:-1]).pop(path[-1], None) is not None:
            yield path, dropped
        for value in values_of(field):
            changed = copy.deepcopy(base)
            _at(changed, path[:-1])[path[-1]] = value
            yield path, changed
        if field.get("type") == "object" and "properties" in field:
            changed = copy.deepcopy(base)
            _at(changed, path)["zzUnknown"] = 1
            yield path, changed


def _at(spec: JSON, path: Path_) -> JSON:
    for name in path:
        spec = spec.setdefault(name, {})
    return spec


@pytest.fixture(scope="module")
def api_server(_installed: None, cluster: Cluster) -> Ask:
    configuration = client.Configuration()
    config.load_kube_config(str(cluster.kubeconfig), client_configuration=configuration)
    objects = client.CustomObjectsApi(client.ApiClient(configuration))

    def ask(manifest: JSON) -> str | None:
        place = "mlora.dev", "v1alpha1", "default", manifest["kind"].lower() + "s"
        try:
            objects.create_namespaced_custom_object(
                *place, manifest, dry_run="All", field_validation="Strict"
            )
        except client.ApiException as error:
            if error.status not in (400, 422):
                raise
            return str(json.loads(error.body)["message"])
        return None

    return ask


def validate(manifest: JSON) -> str | None:
    problems = read_manifests([("a.yaml", json.dumps(manifest))]).problems
    return "; ".join(map(str, problems)) or None


@pytest.mark.parametrize("base", BASES)
def test_what_one_refuses_the_other_refuses(api_server: Ask, base: str) -> None:
    kind, spec = BASES[base]
    head = {"apiVersion": "mlora.dev/v1alpha1", "kind": kind, "metadata": {"name": "a"}}
    assert api_server({**head, "spec": spec}) is None
    assert validate({**head, "spec": spec}) is None
    differ, asked = [], 0
    for path, changed in mutations(spec, schema_of(kind)):
        where = ".".join(path)
        if (kind, where) in EXCEPTIONS:
            continue
        theirs, ours = api_server({**head, "spec": changed}), validate({**head, "spec": changed})
        asked += 1
        if (theirs is None) is not (ours is None):
            value: Any = changed
            for name in path:
                value = value.get(name, "(dropped)") if isinstance(value, dict) else value
            shown = json.dumps(value, default=str)[:60]
            differ.append(
                f"{where} = {shown}: API server {theirs or 'takes it'}; validate {ours or 'takes it'}"[:500]
            )
    assert asked > 100
    assert not differ, f"{len(differ)} of {asked}:\n" + "\n".join(differ)
