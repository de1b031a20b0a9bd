"""``mlora plan``: what would become of the manifests' tasks, without training."""

from __future__ import annotations

import importlib.util
import os
from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.markup import escape

from mlora_operator.api.pipeline import LoRAPipelineSpec
from mlora_operator.api.task import LoRATaskSpec
from mlora_operator.api.units import parse_bytes
from mlora_operator.cli import exit_codes
from mlora_operator.cli.options import FilesArgument, OutputOption
from mlora_operator.cli.output import CommandError, OutputFormat, print_json, stderr, stdout
from mlora_operator.cli.plan.view import as_json, lines
from mlora_operator.cli.run.command import models_of, world_of
from mlora_operator.cli.validate.command import read_texts
from mlora_operator.local.access import access_to
from mlora_operator.local.adapt import Device, Dtype, RunOptions
from mlora_operator.local.fits import LearnedPipeline, beside_models
from mlora_operator.local.forecast import DeviceMemory, PipelineForecast, forecast
from mlora_operator.local.machine import Machine, this_machine
from mlora_operator.local.manifests import Manifests, PipelineManifest, read_manifests
from mlora_operator.local.run_environment import models_folder
from mlora_operator.local.served import Served, Service, service
from mlora_operator.local.survey import SurveyFailed, ask
from mlora_operator.memory.origin import named_origin, origin_of
from mlora_operator.reconcile.state.references import storage_access
from mlora_operator.reconcile.state.snapshot import Key, Task
from mlora_worker.protocol import (
    HUB_ENDPOINT,
    Failure,
    ModelFacts,
    ModelSource,
    QuantizationType,
    StageShape,
    StorageAccess,
    SurveyAnswer,
    SurveyQuestion,
    TaskAnswer,
    TaskQuestion,
)
from mlora_worker.stream.fit import misfit

_GPU = "nvidia.com/gpu"


def plan(
    files: FilesArgument,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            metavar="NAME=PLACE",
            help="Location of a base model: a folder, or an address (file, s3, hf, https).",
        ),
    ] = None,
    stages: Annotated[int | None, typer.Option(min=1, max=64, help="Stages of every pipeline.")] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Data type of the frozen weights.")] = None,
    quantization: Annotated[
        QuantizationType | None, typer.Option(help="How the frozen matrices are kept: none, nf4 or int8.")
    ] = None,
    device: Annotated[
        Device,
        typer.Option(
            help="Device to plan for; auto: GPUs if a pipeline requests them or this machine has them."
        ),
    ] = "auto",
    memory: Annotated[
        str | None, typer.Option(metavar="QUANTITY", help="Memory of each stage, such as 80Gi.")
    ] = None,
    s3_endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="S3 endpoint that replaces those in the manifests.")
    ] = None,
    rows: Annotated[
        int,
        typer.Option(
            min=0,
            help="Maximum number of rows to tokenise per data set; 0: none, and every row counts as maxSeqLength tokens.",
        ),
    ] = 1000,
    tokens_per_second: Annotated[
        float | None,
        typer.Option(min=0, help="Throughput of one device with the whole model, for absolute figures."),
    ] = None,
    output: OutputOption = OutputFormat.TEXT,
) -> None:
    """Show admission, microbatch schedule, memory and expected throughput without training.

    The exit code is 0 when every task can be admitted now or later, and 1 when one never can.
    """
    machine = this_machine(os.environ)
    manifests = read_manifests(read_texts(files))
    options = RunOptions(
        models_of(model or []), stages, dtype, None, device, s3_endpoint, quantization=quantization
    )
    world = world_of(manifests, options, machine)
    found = service(world, datetime.now(UTC))
    asked = _bytes(memory)
    forecasts = []
    for one in found.served:
        origin = _manifest_of(one, manifests)
        answer = _answer(one, origin, found, rows)
        if answer.failure is not None:
            raise CommandError(
                f"{one.pipeline.key}: {answer.failure.reason.value}: {answer.failure.message}",
                exit_codes.INVALID,
            )
        forecasts.append(_forecast(one, origin, answer, machine, device, asked, tokens_per_second))
    _show(forecasts, found, output)
    hopeless = any(task.state in ("Failed", "Rejected") for one in forecasts for task in one.tasks)
    raise typer.Exit(exit_codes.FAILED if hopeless or found.unserved else exit_codes.OK)


def _bytes(memory: str | None) -> int | None:
    if memory is None:
        return None
    try:
        return parse_bytes(memory)
    except ValueError as error:
        raise CommandError(f"--memory: {error}", exit_codes.INVALID) from error


def _manifest_of(one: Served, manifests: Manifests) -> PipelineManifest | None:
    """What the user wrote; None when the operator would make the pipeline from its catalogue."""
    key = one.pipeline.key
    found = (
        manifest
        for manifest in manifests.pipelines
        if (manifest.place.namespace, manifest.place.name) == (key.namespace, key.name)
    )
    return next(found, None)


def _answer(one: Served, origin: PipelineManifest | None, found: Service, rows: int) -> SurveyAnswer:
    """From the status that a cluster wrote, where there is one; else a worker process looks at the model."""
    spec = one.pipeline.spec
    assert spec is not None
    known = origin.status if origin is not None else None
    if known is not None and known.facts is not None and len(known.stages) == spec.stages:
        facts = known.facts
        return SurveyAnswer(
            facts=facts,
            stages=tuple(
                StageShape(
                    stage=stage.stage,
                    first_layer=stage.first_layer,
                    last_layer=stage.last_layer,
                    parameters=stage.parameters
                    if stage.parameters is not None
                    else stage.resident_bytes // facts.dtype_bytes,
                    resident_bytes=stage.resident_bytes,
                    products=stage.products,
                    quantized=bool(stage.quantized),
                )
                for stage in known.stages
            ),
            tasks=tuple(
                TaskAnswer(uid=task.uid, failure=_misfit(facts, task.spec))
                for task in one.tasks
                if task.spec is not None
            ),
        )
    if importlib.util.find_spec("torch") is None:
        raise CommandError(
            "reading a base model needs the worker: run pip install 'mlora-operator[worker]', or give the "
            "LoRAPipeline with its status: kubectl get lorapipeline NAME -o yaml",
            exit_codes.INVALID,
        )
    try:
        return ask(_question(one, found, rows), dict(os.environ))
    except SurveyFailed as error:
        raise CommandError(
            f"{one.pipeline.key}: the model cannot be read: {error}", exit_codes.FAILED
        ) from error


def _misfit(facts: ModelFacts, spec: LoRATaskSpec) -> Failure | None:
    return misfit(facts, spec.lora, spec.training.for_model(facts.max_positions))


def _question(one: Served, found: Service, rows: int) -> SurveyQuestion:
    spec = one.pipeline.spec
    assert spec is not None
    reference = spec.storage.secret_ref
    keys = found.secrets.get(Key(one.pipeline.key.namespace, reference.name)) if reference else None
    return SurveyQuestion(
        model=ModelSource.model_validate(spec.model.model_dump()),
        stages=spec.stages,
        storage=access_to(spec.storage, keys, os.environ),
        hub_endpoint=spec.worker.hub_endpoint or HUB_ENDPOINT,
        cache_dir=str(models_folder(os.environ)),
        sample_rows=rows,
        tasks=tuple(
            TaskQuestion(
                uid=task.uid,
                lora=task.spec.lora,
                dataset=task.spec.dataset.for_plan(),
                training=task.spec.training,
                storage=_storage(task, found),
            )
            for task in one.tasks
            if task.spec is not None
        ),
    )


def _storage(task: Task, found: Service) -> StorageAccess | None:
    """None when its rows cannot be read for want of keys; a file needs none."""
    assert task.spec is not None
    if any(uri.startswith("file://") for uri in task.spec.dataset.addresses):
        return StorageAccess()
    return storage_access(task, found.secrets)


def _forecast(
    one: Served,
    origin: PipelineManifest | None,
    answer: SurveyAnswer,
    machine: Machine,
    wish: Device,
    asked: int | None,
    tokens_per_second: float | None,
) -> PipelineForecast:
    spec = one.pipeline.spec
    assert spec is not None
    limits = spec.worker.resources.get("limits") or {}
    here = bool(machine.gpus) and origin is None
    gpu = wish == "cuda" or (wish == "auto" and (_GPU in limits or here))
    return forecast(
        str(one.pipeline.key),
        spec,
        one.tasks,
        answer,
        device="cuda" if gpu else "cpu",
        memory=memory_of(spec.stages, origin, spec.memory.budget, asked, gpu=gpu),
        tokens_per_second=tokens_per_second,
        known=_known(spec, origin, gpu=gpu),
    )


def _known(spec: LoRAPipelineSpec, origin: PipelineManifest | None, *, gpu: bool) -> LearnedPipeline:
    """What was learned of the pipeline's memory: by its cluster, as the manifest tells, else by a run here."""
    if origin is not None and origin.status.memory:
        status = origin.status
        same = origin_of(spec, status.stages)
        return LearnedPipeline(
            memory=tuple(one for one in status.memory if one.origin == same), stages=status.stages
        )
    return beside_models(models_folder(os.environ)).read(named_origin(spec, ["cuda" if gpu else "cpu"]))


def memory_of(
    stages: int, origin: PipelineManifest | None, share: str | None, asked: int | None, *, gpu: bool
) -> DeviceMemory:
    """Of each stage: what was asked for, else what the pipeline says, else what its workers had when they last ran, else
    their limit; else (``share``) a part of this machine's.
    """
    if asked is not None:
        return DeviceMemory((asked,) * stages, "as --memory says")
    if origin is not None and origin.spec.memory.budget is not None:
        return DeviceMemory(
            (parse_bytes(origin.spec.memory.budget),) * stages, "the pipeline's memory.budget"
        )
    if origin is not None and len(origin.status.stages) == stages:
        known = tuple(stage.capacity_bytes for stage in origin.status.stages)
        return DeviceMemory(known, "what the workers had when they last ran")
    limits = (origin.spec.worker.resources.get("limits") or {}) if origin is not None else {}
    if gpu:
        return DeviceMemory(None, "that of a GPU")
    if "memory" in limits:
        return DeviceMemory((parse_bytes(str(limits["memory"])),) * stages, "the workers' memory limit")
    if share is not None:
        return DeviceMemory((parse_bytes(share),) * stages, f"this machine's, shared by {stages} stages")
    return DeviceMemory(None, "that of a GPU")


def _show(forecasts: list[PipelineForecast], found: Service, output: OutputFormat) -> None:
    missing = [
        f"Secret {key} is not in the given files, so its store is not read" for key in sorted(found.missing)
    ]
    if output is OutputFormat.JSON:
        print_json(as_json(forecasts, found.unserved, missing))
        return
    for line in lines(forecasts):
        stdout().print(escape(line))
    for line in missing:
        stderr().print(f"[dim]{escape(line)}[/]")
    for task, cause in found.unserved:
        stderr().print(f"[red]{escape(f'{task.key}: {cause}')}[/]")
