"""What goes over the wire to workers of other versions."""

from __future__ import annotations

import json
from enum import Enum
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from mlora_worker.protocol import (
    Dataset,
    Evaluation,
    InitFrom,
    LoRAConfig,
    Optimizer,
    Plan,
    StorageAccess,
    TaskPlan,
    Training,
)

# A plan leaves out what is as it is by default. So whoever changes a default changes what plans mean to workers of another
# version: give the field a new name instead. A field that is new is added here.
DEFAULTS: dict[type[BaseModel], dict[str, Any]] = {
    LoRAConfig: {
        "type": "lora",
        "dInitial": None,
        "rank": 16,
        "alpha": 32,
        "dropout": 0.0,
        "targetModules": ["q_proj", "v_proj"],
        "targetParameters": [],
        "excludeModules": [],
        "layersToTransform": [],
        "rankPattern": {},
        "alphaPattern": {},
        "useRslora": False,
        "useDora": False,
        "initLoraWeights": "default",
        "loraplusLrRatio": None,
    },
    Dataset: {
        "uri": None,
        "uris": None,
        "inline": None,
        "configMapRef": None,
        "format": "promptCompletion",
        "fileFormat": None,
        "fields": {
            "prompt": "prompt",
            "completion": "completion",
            "messages": "messages",
            "conversations": "conversations",
            "instruction": "instruction",
            "input": "input",
            "output": "output",
            "system": "system",
            "text": "text",
            "chosen": "chosen",
            "rejected": "rejected",
            "label": "label",
        },
        "trainOn": None,
        "chatTemplate": None,
        "chatTemplateRef": None,
        "split": None,
        "limit": None,
        "shuffleSeed": None,
        "heldOut": None,
        "detectFormat": False,
    },
    Training: {
        "objective": None,
        "batchSize": 8,
        "gradientAccumulationSteps": 1,
        "epochs": 1,
        "maxSteps": None,
        "learningRate": 0.0002,
        "schedule": "cosine",
        "warmupSteps": 0,
        "warmupRatio": None,
        "weightDecay": 0.0,
        "optimizer": None,
        "maxGradNorm": 1.0,
        "maxSeqLength": 512,
        "overlong": "truncate",
        "seed": 42,
        "checkpointEverySteps": 50,
    },
    Optimizer: {"type": "adamw", "beta1": None, "beta2": None, "epsilon": None},
    Evaluation: {"uri": None, "limit": None, "everySteps": 50, "earlyStopping": None, "keepBest": False},
    InitFrom: {},
    StorageAccess: {
        "endpoint": None,
        "region": "us-east-1",
        "addressing": "auto",
        "checksums": "auto",
        "caCertificate": None,
        "accessKey": None,
        "secretKey": None,
        "sessionToken": None,
        "hubToken": None,
        "serverSideEncryption": None,
        "kmsKeyId": None,
    },
    TaskPlan: {
        "generation": None,
        "priority": 0,
        "admitted": False,
        "started": False,
        "datasetText": None,
        "templateText": None,
        "datasetDigest": None,
        "templateDigest": None,
        "evaluation": None,
        "initFrom": None,
        "outputDtype": "float32",
        "outputOverwrite": False,
        "baseModelName": None,
        "storage": {"region": "us-east-1", "addressing": "auto", "checksums": "auto"},
    },
}


def _defaults(model: type[BaseModel]) -> dict[str, Any]:
    return {
        field.alias or name: _plain(field.get_default(call_default_factory=True))
        for name, field in model.model_fields.items()
        if not field.is_required()
    }


def _plain(value: Any) -> Any:
    assert value is not PydanticUndefined
    if isinstance(value, BaseModel):
        return json.loads(value.model_dump_json(by_alias=True, exclude_none=True))
    if isinstance(value, Enum):
        return value.value
    return list(value) if isinstance(value, tuple) else value


def test_defaults_stay_what_they_are() -> None:
    assert {model: _defaults(model) for model in DEFAULTS} == DEFAULTS


def test_a_plan_says_only_what_differs_from_them() -> None:
    task = TaskPlan(
        uid="a", namespace="n", name="t", base_model="m", lora=LoRAConfig(rank=4), dataset=Dataset(inline="{}"),
        training=Training(), output_uri="s3://b/p",
    )  # fmt: skip
    plan = Plan(generation=3, tasks=(task,))
    assert json.loads(plan.to_json()) == {
        "generation": 3,
        "tasks": [
            {
                "uid": "a",
                "namespace": "n",
                "name": "t",
                "baseModel": "m",
                "lora": {"rank": 4},
                "dataset": {"inline": "{}"},
                "training": {},
                "outputUri": "s3://b/p",
            }
        ],
    }
    assert Plan.model_validate_json(plan.to_json()) == plan
