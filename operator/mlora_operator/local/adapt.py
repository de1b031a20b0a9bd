"""The user's manifests, adapted to this machine: what a cluster would give and a laptop has not. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mlora_operator.api import API_VERSION, pipeline, task
from mlora_operator.api.pipeline import LoRAPipelineSpec
from mlora_operator.api.priorities import HIGHEST, Priorities, PriorityBound
from mlora_operator.api.task import LoRATaskSpec
from mlora_operator.local.machine import Machine
from mlora_operator.local.manifests import DEFAULT_NAMESPACE, Manifests, PipelineManifest, Place, TaskManifest
from mlora_operator.reconcile.state.snapshot import Key, SecretData
from mlora_operator.rights import EVERY, ServingSettings
from mlora_operator.settings import CatalogueModel, Settings, WorkerDefaults

Dtype = Literal["float32", "bfloat16"]
Device = Literal["auto", "cpu", "cuda"]


class InvalidRun(Exception):
    """The manifests and options do not make a run; the message says what to change."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the user said beside the manifests. None: as the manifests say, or as fits the machine."""

    models: Mapping[str, str] = field(default_factory=dict)  # name of a base model -> where it lies
    stages: int | None = None
    dtype: Dtype | None = None
    threads: int | None = None
    device: Device = "auto"
    s3_endpoint: str | None = None
    restarts: int | None = None  # how often in a row ranks that fail are started again
    overwrite: bool = False  # adapters that lie at outputs may be replaced


@dataclass(frozen=True, slots=True)
class World:
    """What there is at the start of a run."""

    tasks: tuple[dict[str, Any], ...]  # objects without uid and status
    pipelines: tuple[dict[str, Any], ...]
    secrets: Mapping[Key, SecretData] = field(repr=False)
    settings: Settings
    device: Device


def adapt(manifests: Manifests, wishes: Wishes, machine: Machine) -> World:
    """The world of a run. Raises InvalidRun.

    1. ``wishes.s3_endpoint`` replaces every endpoint: names inside a cluster do not resolve here.
    2. A LoRAPipeline of the manifests serves its model as it says, with the wished stages, type and threads.
    3. Any other base model comes from ``wishes.models``, like from a chart's catalogue.
    4. ``wishes.overwrite`` makes every task say that it may replace what lies at its output.
    5. Ranks on one machine share its processors and its memory, so a pipeline has no replicas.
    """
    if not manifests.tasks:
        raise InvalidRun("these files contain no LoRATask")
    pipelines = tuple(_pipeline(one, wishes, machine) for one in manifests.pipelines)
    served = {one["spec"]["model"]["name"] for one in pipelines}
    for one in manifests.tasks:
        if one.spec.base_model not in served | wishes.models.keys():
            name, place = one.spec.base_model, one.place
            where = f"{place.file}:{place.line}: {place.kind}/{place.name}"
            raise InvalidRun(f"{where}: the location of {name} is not known: add --model {name}=FOLDER")
    settings = Settings(
        namespace=DEFAULT_NAMESPACE,
        worker=WorkerDefaults(image="local"),
        models=tuple(
            _catalogue_model(name, place, wishes, machine)
            for name, place in wishes.models.items()
            if name not in served
        ),
        allow_file_uris=True,
        allow_private_endpoints=True,
        # All manifests are one user's.
        serving=ServingSettings(namespaces=(EVERY,)),
        priorities=Priorities(default=PriorityBound(max=HIGHEST)),
    )
    return World(
        tasks=tuple(_task(one, wishes) for one in manifests.tasks),
        pipelines=pipelines,
        secrets={Key(one.place.namespace, one.place.name): one.data for one in manifests.secrets},
        settings=settings,
        device=wishes.device,
    )


def model_uri(place: str, base: Path) -> str:
    """An address, or a path relative to ``base`` as one. Raises InvalidRun."""
    if place.startswith(("s3://", "file://", "hf://", "http://", "https://")):
        return place
    if "://" in place:
        raise InvalidRun(
            f"{place!r}: a base model must be a folder or an address with s3://, hf://, http:// or https://"
        )
    folder = (base / place).resolve()
    if not (folder / "config.json").is_file():
        raise InvalidRun(f"{folder} is not the folder of a model: config.json is missing")
    return folder.as_uri()


def _task(manifest: TaskManifest, wishes: Wishes) -> dict[str, Any]:
    made = _object(task.KIND, manifest.place, manifest.spec, wishes)
    if wishes.overwrite:
        made["spec"]["output"]["overwrite"] = True
    return made


def _pipeline(manifest: PipelineManifest, wishes: Wishes, machine: Machine) -> dict[str, Any]:
    made = _object(pipeline.KIND, manifest.place, manifest.spec, wishes)
    spec = made["spec"]
    if manifest.spec.model.name in wishes.models:
        spec["model"]["uri"] = wishes.models[manifest.spec.model.name]
    if wishes.dtype is not None:
        spec["model"]["dtype"] = wishes.dtype
    if wishes.stages is not None:
        spec["stages"] = wishes.stages
    threads = wishes.threads or manifest.spec.worker.threads
    spec["worker"]["threads"] = threads or machine.threads_of(spec["stages"])
    spec.pop(
        "replicas", None
    )  # of one machine's memory and processors another group would only take its share
    if wishes.restarts is not None:
        spec["restarts"]["limit"] = wishes.restarts
    if manifest.spec.memory.budget is None:
        spec["memory"]["budget"] = _share(machine, spec["stages"], wishes.device)
    made["spec"] = _dump(LoRAPipelineSpec.model_validate(spec))
    return made


def _catalogue_model(name: str, uri: str, wishes: Wishes, machine: Machine) -> CatalogueModel:
    stages = wishes.stages or 1
    # Processors without bfloat16 arithmetic are slow at it, and there float32 costs only memory.
    dtype = wishes.dtype or ("bfloat16" if _on_gpu(machine, wishes.device) else "float32")
    return CatalogueModel.model_validate(
        {
            "name": name,
            "uri": uri,
            "dtype": dtype,
            "stages": stages,
            "memory": {"budget": _share(machine, stages, wishes.device)},
            "storage": {"endpoint": wishes.s3_endpoint},
            "restarts": {} if wishes.restarts is None else {"limit": wishes.restarts},
            "worker": {"threads": wishes.threads or machine.threads_of(stages)},
        }
    )


def _share(machine: Machine, stages: int, device: Device) -> str | None:
    """Memory of one rank: its part of the machine's, or (None) what its GPU has."""
    return None if _on_gpu(machine, device) else str(machine.memory_bytes // stages)


def _on_gpu(machine: Machine, device: Device) -> bool:
    return device != "cpu" and bool(machine.gpus)


def _object(kind: str, place: Place, spec: LoRATaskSpec | LoRAPipelineSpec, wishes: Wishes) -> dict[str, Any]:
    content = _dump(spec)
    if wishes.s3_endpoint is not None:
        content["storage"]["endpoint"] = wishes.s3_endpoint
    metadata = {"namespace": place.namespace, "name": place.name}
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": metadata, "spec": content}


def _dump(spec: LoRATaskSpec | LoRAPipelineSpec) -> dict[str, Any]:
    """With all defaults, like an object that the API server has stored."""
    return spec.model_dump(mode="json", by_alias=True, exclude_none=True)
