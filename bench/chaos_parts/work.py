"""The tasks: a few kinds of them, each trained many times under other names; and the model, small and random."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.chaos_parts.processes import Processes
from tests.fixtures.storage import Storage

BASE_MODEL = "chaos/tiny"
MODEL_URI, ROWS_KEY = "s3://models/tiny", "rows.jsonl"
SECRET = "store"
STAGES, LAYERS = 2, 2
MICROBATCH_TOKENS = 16  # fewer than any row has: each row travels alone, so that no neighbour changes a bit
KINDS = (
    {"rank": 4, "alpha": 8, "dropout": 0.1, "targetModules": ["q_proj", "v_proj", "down_proj"]},
    {"rank": 8, "alpha": 16, "dropout": 0.0, "targetModules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
    {"rank": 2, "alpha": 4, "dropout": 0.2, "targetModules": ["all-linear"]},
    {"rank": 16, "alpha": 16, "dropout": 0.05, "targetModules": ["gate_proj", "up_proj", "down_proj"]},
)


def rows() -> bytes:
    """The data set of all tasks, JSON lines."""
    made = [
        {
            "question": f"What is {number} plus {number % 7}? " + "Think. " * (number % 4),
            "answer": f"It is {number + number % 7}. " + "So. " * (number % 3),
        }
        for number in range(24)
    ]
    return "\n".join(json.dumps(row) for row in made).encode()


def task_spec(kind: int, name: str, steps: int, every: int, endpoint: str) -> dict[str, Any]:
    """Spec of a LoRATask of kind ``kind``; its result does not depend on ``name``."""
    return {
        "baseModel": BASE_MODEL,
        "lora": KINDS[kind % len(KINDS)],
        "dataset": {
            "uri": f"s3://datasets/{ROWS_KEY}",
            "format": "promptCompletion",
            "fields": {"prompt": "question", "completion": "answer"},
        },
        "training": {
            "batchSize": 1,
            "gradientAccumulationSteps": 1 + kind % 2,
            "maxSteps": steps,
            "learningRate": 1e-3,
            "schedule": "cosine",
            "warmupSteps": 4,
            "weightDecay": 0.1,
            "maxSeqLength": 64,
            "seed": 7 + kind,
            "checkpointEverySteps": every,
        },
        "output": {"uri": output_uri(name)},
        "storage": storage(endpoint),
    }


def output_uri(name: str) -> str:
    return f"s3://adapters/chaos/{name}"


def fill(store: Storage, nursery: Processes, folder: Path) -> None:
    """The model, made in ``folder``, and the rows, in the store."""
    nursery.run("model", {"CHAOS_MODEL": str(folder)}, "model.log")
    for path in sorted(folder.iterdir()):
        store.client.put_object(Bucket="models", Key=f"tiny/{path.name}", Body=path.read_bytes())
    store.client.put_object(Bucket="datasets", Key=ROWS_KEY, Body=rows())


def pipeline_spec(endpoint: str, stall: str) -> dict[str, Any]:
    return {
        "model": {"name": BASE_MODEL, "uri": MODEL_URI, "dtype": "float32"},
        "stages": STAGES,
        "memory": {"budget": "2Gi"},
        "microbatchTokens": MICROBATCH_TOKENS,
        "stallTimeout": stall,
        "restarts": {
            "limit": 1_000_000
        },  # every fault here was not created by the operator, so none shall end the pipeline
        "storage": storage(endpoint),
    }


def storage(endpoint: str) -> Mapping[str, Any]:
    return {"endpoint": endpoint, "secretRef": {"name": SECRET}}


def write_model() -> None:
    """Program of the nursery: the model, to the folder that ``CHAOS_MODEL`` names."""
    from tests.fixtures.tiny_model import write_tiny_model

    write_tiny_model(Path(os.environ["CHAOS_MODEL"]), layers=LAYERS)
