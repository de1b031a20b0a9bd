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
from mlora_operator.local.manifests import (
    DEFAULT_NAMESPACE,
    Manifests,
    ObjectSource,
    PipelineManifest,
    TaskManifest,
)
from mlora_operator.reconcile.state.snapshot import Key, SecretData
from mlora_operator.rights import EVERY, ServingSettings
from mlora_operator.settings import CatalogueModel, Settings, WorkerDefaults
from mlora_worker.protocol import QuantizationType

Dtype = Literal["float32", "bfloat16"]
Device = Literal["auto", "cpu", "cuda"]


class InvalidRun(Exception):
    """The manifests and options do not make a run; the message says what to change."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What the user said beside the manifests. None: as the manifests say, or as fits the machine."""

    models: Mapping[str, str] = field(default_factory=dict)  # name of a base model -> where it lies
    stages: int | None = None
    dtype: Dtype | None = None
    threads: int | None = None
    device: Device = "auto"
    s3_endpoint: str | None = None
    restarts: int | None = None  # how often in a row ranks that fail are started again
    overwrite: bool = False  # adapters that lie at outputs may be replaced
    quantization: QuantizationType | None = None


@dataclass(frozen=True, slots=True)
class RunInputs:
    """What there is at the start of a run."""

    tasks: tuple[dict[str, Any], ...]  # objects without uid and status
    pipelines: tuple[dict[str, Any], ...]
    secrets: Mapping[Key, SecretData] = field(repr=False)
    settings: Settings
    device: Device


def adapt(manifests: Manifests, options: RunOptions, machine: Machine) -> RunInputs:
    """The world of a run. Raises InvalidRun.

    1. ``options.s3_endpoint`` replaces every endpoint: names inside a cluster do not resolve here.
    2. A LoRAPipeline of the manifests serves its model as it says, with the wished stages, type and threads.
    3. Any other base model comes from ``options.models``, like from a chart's catalogue.
    4. ``options.overwrite`` makes every task say that it may replace what lies at its output.
    5. Ranks on one machine share its processors and its memory, so a pipeline has no replicas.
    """
    if not manifests.tasks:
        raise InvalidRun("these files contain no LoRATask")
    pipelines = tuple(_pipeline(one, options, machine) for one in manifests.pipelines)
    served = {one["spec"]["model"]["name"] for one in pipelines}
    for one in manifests.tasks:
        if one.spec.base_model not in served | options.models.keys():
            name, place = one.spec.base_model, one.place
            where = f"{place.file}:{place.line}: {place.kind}/{place.name}"
            raise InvalidRun(f"{where}: the location of {name} is not known: add --model {name}=FOLDER")
    settings = Settings(
        namespace=DEFAULT_NAMESPACE,
        worker=WorkerDefaults(image="local"),
        models=tuple(
            _catalogue_model(name, place, options, machine)
            for name, place in options.models.items()
            if name not in served
        ),
        allow_file_uris=True,
        allow_private_endpoints=True,
        # All manifests are one user's.
        serving=ServingSettings(namespaces=(EVERY,)),
        priorities=Priorities(default=PriorityBound(max=HIGHEST)),
    )
    return RunInputs(
        tasks=tuple(_task(one, options) for one in manifests.tasks),
        pipelines=pipelines,
        secrets={Key(one.place.namespace, one.place.name): one.data for one in manifests.secrets},
        settings=settings,
        device=options.device,
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


def _task(manifest: TaskManifest, options: RunOptions) -> dict[str, Any]:
    made = _object(task.KIND, manifest.place, manifest.spec, options)
    if options.overwrite:
        made["spec"]["output"]["overwrite"] = True
    return made


def _pipeline(manifest: PipelineManifest, options: RunOptions, machine: Machine) -> dict[str, Any]:
    made = _object(pipeline.KIND, manifest.place, manifest.spec, options)
    spec = made["spec"]
    if manifest.spec.model.name in options.models:
        spec["model"]["uri"] = options.models[manifest.spec.model.name]
    if options.dtype is not None:
        spec["model"]["dtype"] = options.dtype
    if options.quantization is not None:
        spec["model"]["quantization"]["type"] = options.quantization
    if options.stages is not None:
        spec["stages"] = options.stages
    threads = options.threads or manifest.spec.worker.threads
    spec["worker"]["threads"] = threads or machine.threads_of(spec["stages"])
    spec.pop(
        "replicas", None
    )  # of one machine's memory and processors another group would only take its share
    if options.restarts is not None:
        spec["restarts"]["limit"] = options.restarts
    if manifest.spec.memory.budget is None:
        spec["memory"]["budget"] = _share(machine, spec["stages"], options.device)
    made["spec"] = _dump(LoRAPipelineSpec.model_validate(spec))
    return made


def _catalogue_model(name: str, uri: str, options: RunOptions, machine: Machine) -> CatalogueModel:
    stages = options.stages or 1
    # Processors without bfloat16 arithmetic are slow at it, and there float32 costs only memory.
    dtype = options.dtype or ("bfloat16" if _on_gpu(machine, options.device) else "float32")
    return CatalogueModel.model_validate(
        {
            "name": name,
            "uri": uri,
            "dtype": dtype,
            "quantization": {"type": options.quantization or "none"},
            "stages": stages,
            "memory": {"budget": _share(machine, stages, options.device)},
            "storage": {"endpoint": options.s3_endpoint},
            "restarts": {} if options.restarts is None else {"limit": options.restarts},
            "worker": {"threads": options.threads or machine.threads_of(stages)},
        }
    )


def _share(machine: Machine, stages: int, device: Device) -> str | None:
    """Memory of one rank: its part of the machine's, or (None) what its GPU has."""
    return None if _on_gpu(machine, device) else str(machine.memory_bytes // stages)


def _on_gpu(machine: Machine, device: Device) -> bool:
    return device != "cpu" and bool(machine.gpus)


def _object(
    kind: str, place: ObjectSource, spec: LoRATaskSpec | LoRAPipelineSpec, options: RunOptions
) -> dict[str, Any]:
    content = _dump(spec)
    if options.s3_endpoint is not None:
        content["storage"]["endpoint"] = options.s3_endpoint
    metadata = {"namespace": place.namespace, "name": place.name}
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": metadata, "spec": content}


def _dump(spec: LoRATaskSpec | LoRAPipelineSpec) -> dict[str, Any]:
    """With all defaults, like an object that the API server has stored."""
    return spec.model_dump(mode="json", by_alias=True, exclude_none=True)
