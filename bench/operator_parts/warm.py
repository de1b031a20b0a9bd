"""From a task's request to its first step: the real operator, two real ranks, a tiny model."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.operator_parts.process import Operator
from bench.operator_parts.server import Server
from bench.ranks import Ranks
from mlora_operator.api import API_VERSION
from mlora_operator.api import pipeline as lorapipeline
from mlora_operator.api import task as loratask
from mlora_operator.manifests.names import child_name
from mlora_operator.manifests.secret import TOKEN_KEY
from tests.fixtures.tiny_model import write_tiny_model

MODEL, PIPELINE, STAGES = "Bench/Tiny", "warm", 2
ROW = '{"prompt": "What is the answer to the question?", "completion": "The number that follows."}\n'
ROWS = 16
_WITHIN = 600.0  # seconds; ranks import for long on a machine that is busy


@dataclass(frozen=True)
class Warm:
    """A namespace of its own, and a folder for what is written."""

    server: Server
    namespace: str
    kubeconfig: Mapping[str, Any]
    folder: Path


async def first_steps(warm: Warm, count: int) -> list[float]:
    """Seconds from the request of each of ``count`` tasks, one after the other, to its first step. One goes before them,
    for which the ranks start and compile what they compile. Raises RuntimeError."""
    warm.folder.mkdir(parents=True)
    model = await asyncio.to_thread(write_tiny_model, warm.folder / "model")
    ranks = Ranks(model, STAGES, warm.folder / "ranks", threads=1)
    await _prepare(warm, ranks)
    settings = {
        "namespace": warm.namespace,
        "watchNamespaces": [warm.namespace],
        "worker": {"image": "worker:1"},
        "coordinatorTls": False,  # the ranks are no pods
        "coordinatorUrl": f"http://127.0.0.1:{ranks.config.http_port}",
        "allowFileUris": True,
    }
    with ranks, Operator(warm.folder / "operator", warm.kubeconfig, settings):
        times = [await _first_step(warm, ranks, f"warm-{number}") for number in range(count + 1)]
    return times[1:]


async def _prepare(warm: Warm, ranks: Ranks) -> None:
    """A pipeline whose pods find no node, and the token that the ranks have in the place of one that the operator makes."""
    token = await asyncio.to_thread(Path(ranks.config.token_file).read_bytes)
    await warm.server.create(
        f"/api/v1/namespaces/{warm.namespace}/secrets",
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": f"{child_name(PIPELINE)}-token"},
            "data": {TOKEN_KEY: base64.b64encode(token).decode()},
        },
    )
    spec = {
        "model": {"name": MODEL, "uri": "s3://models/tiny", "dtype": "float32"},
        "stages": STAGES,
        "startTimeout": "24h",
        "worker": {"nodeSelector": {"nowhere": "yes"}},
    }
    await warm.server.create(
        f"/apis/{API_VERSION}/namespaces/{warm.namespace}/{lorapipeline.PLURAL}",
        {"apiVersion": API_VERSION, "kind": lorapipeline.KIND, "metadata": {"name": PIPELINE}, "spec": spec},
    )


async def _first_step(warm: Warm, ranks: Ranks, name: str) -> float:
    path = f"/apis/{API_VERSION}/namespaces/{warm.namespace}/{loratask.PLURAL}"
    sent = time.perf_counter()
    made = await warm.server.create(path, _manifest(name, warm.folder))
    step = await asyncio.to_thread(_stepped, ranks, made["metadata"]["uid"])
    end = time.monotonic() + _WITHIN
    while (await warm.server.get(f"{path}/{name}")).get("status", {}).get("state") != "Succeeded":
        if time.monotonic() > end:
            raise RuntimeError(f"task {name} did not end")
        await asyncio.sleep(0.2)
    return step - sent


def _stepped(ranks: Ranks, uid: str) -> float:
    """When the coordinator said that the task had a step behind it. Until the model is loaded it says nothing."""
    end = time.monotonic() + _WITHIN
    while True:
        try:
            for came, report in ranks.reports(_WITHIN):
                if any(task.uid == uid and task.step > 0 for task in report.tasks):
                    return came
        except OSError:  # urllib's errors, too
            if time.monotonic() > end:
                raise
            time.sleep(0.5)


def _manifest(name: str, folder: Path) -> dict[str, Any]:
    return {
        "apiVersion": API_VERSION,
        "kind": loratask.KIND,
        "metadata": {"name": name},
        "spec": {
            "baseModel": MODEL,
            "lora": {"rank": 8, "alpha": 16, "targetModules": ["q_proj", "v_proj"]},
            "dataset": {"inline": ROW * ROWS},
            "training": {"batchSize": 2, "maxSteps": 4, "learningRate": 0.001, "maxSeqLength": 64},
            "output": {"uri": f"file://{folder}/adapters/{name}"},
        },
    }
