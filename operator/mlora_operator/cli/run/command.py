"""``mlora run``: the same manifests without a cluster."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from mlora_operator.api.meta import Model, Storage
from mlora_operator.api.pipeline import BaseModelSource
from mlora_operator.api.problem import describe
from mlora_operator.cli import exit_codes
from mlora_operator.cli.options import FilesArgument, OutputOption, TimeoutOption
from mlora_operator.cli.output import CommandError, OutputFormat, stderr
from mlora_operator.cli.run.progress import Bars, JsonProgress, ProgressView
from mlora_operator.cli.validate.command import read_texts
from mlora_operator.local.adapt import Device, Dtype, InvalidRun, RunInputs, RunOptions, adapt, model_uri
from mlora_operator.local.audience import Audience
from mlora_operator.local.ending import End
from mlora_operator.local.machine import Machine, this_machine
from mlora_operator.local.manifests import Manifests, read_manifests
from mlora_operator.local.run_environment import PageNotServed, RunEnvironment, models_folder
from mlora_operator.logs import TextLogLines
from mlora_worker.protocol import QuantizationType


def run(
    files: FilesArgument,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            metavar="NAME=PLACE",
            help="Location of a base model: a folder, or an address (file, s3, hf, https).",
        ),
    ] = None,
    stages: Annotated[
        int | None,
        typer.Option(min=1, max=64, help="Number of stages of every pipeline; each is one process."),
    ] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Data type of the frozen weights.")] = None,
    quantization: Annotated[
        QuantizationType | None, typer.Option(help="How the frozen matrices are kept: none, nf4 or int8.")
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="CPU threads of each process. Default: its share of the machine."),
    ] = None,
    device: Annotated[Device, typer.Option(help="Device to compute on.")] = "auto",
    s3_endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="S3 endpoint that replaces those in the manifests.")
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder for statuses and logs; tasks that succeeded in an earlier run are not trained again.",
        ),
    ] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json",
            help="Write a timeline of all stages as a Chrome trace, and as a picture (FILE.svg).",
        ),
    ] = None,
    page: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65535,
            metavar="PORT",
            help="Show the run in a browser: http://127.0.0.1:PORT, on this machine.",
        ),
    ] = None,
    restarts: Annotated[
        int | None,
        typer.Option(min=0, help="Maximum number of consecutive restarts of a pipeline. Default: 5."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace adapters that already exist at the tasks' outputs.")
    ] = False,
    timeout: TimeoutOption = None,
    output: OutputOption = OutputFormat.TEXT,
) -> None:
    """Train the LoRATasks of the manifests on this machine, then end.

    Runs the operator's own scheduler with local processes for the pods. The exit code is 0 when all
    tasks succeeded, and 1 when one did not.
    """
    machine = this_machine(os.environ)
    options = RunOptions(
        models_of(model or []),
        stages,
        dtype,
        threads,
        device,
        s3_endpoint,
        restarts,
        overwrite,
        quantization,
    )
    world = world_of(read_manifests(read_texts(files)), options, machine)
    check_worker()
    if timeline is not None and not timeline.parent.is_dir():
        raise CommandError(f"--timeline {timeline}: the folder does not exist", exit_codes.INVALID)
    if timeline is not None:
        timeline.unlink(missing_ok=True)  # so that what lies there afterwards is of this run
    folder = state if state is not None else Path(tempfile.mkdtemp(prefix="mlora-run-"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        log_to(folder / "operator.log")
    except OSError as error:
        raise CommandError(f"--state {folder}: {error.strerror}", exit_codes.INVALID) from error
    place = RunEnvironment(
        state=folder,
        cache=models_folder(os.environ),
        machine=machine,
        environment=dict(os.environ),
        timeline=timeline,
        page=page,
    )
    if page is not None:
        stderr().print(f"page: http://127.0.0.1:{page}/ until the run ends")
    view: ProgressView = JsonProgress() if output is OutputFormat.JSON else Bars()
    ends: list[End] = []
    try:
        with view:
            ends = asyncio.run(_run(world, place, view, timeout))
    except TimeoutError:
        message = f"not all tasks finished within {timeout:g} seconds; state and logs: {folder}"
        raise CommandError(message, exit_codes.TIMEOUT) from None
    except PageNotServed as error:
        raise CommandError(f"--page {page}: {error}", exit_codes.INVALID) from error
    finally:
        good = bool(ends) and not any(end.bad for end in ends)
        if good and state is None:
            shutil.rmtree(folder, ignore_errors=True)
    view.ended(ends, folder)
    if timeline is not None:
        wrote = f"timeline: {timeline} and {timeline.with_suffix('.svg').name} beside it"
        stderr().print(wrote if timeline.exists() else "no timeline: no coordinator returned one")
    raise typer.Exit(exit_codes.OK if good else exit_codes.FAILED)


def check_worker() -> None:
    """Raises CommandError where what trains is not installed."""
    if importlib.util.find_spec("torch") is None:
        raise CommandError(
            "training needs the worker: run pip install 'mlora-operator[worker]'", exit_codes.INVALID
        )


def models_of(options: list[str]) -> dict[str, str]:
    """Of ``--model NAME=PLACE``: URIs by name. Raises CommandError."""
    models = {}
    for option in options:
        name, separator, place = option.partition("=")
        if not (name and separator and place):
            raise CommandError(f"--model {option}: expected NAME=PLACE", exit_codes.INVALID)
        try:
            models[name] = model_uri(place, Path.cwd())
        except InvalidRun as error:
            raise CommandError(f"--model {option}: {error}", exit_codes.INVALID) from error
        _check(f"--model {option}", BaseModelSource, name=name, uri=models[name])
    return models


def _check(option: str, model: type[Model], **fields: str) -> None:
    """An option fills in fields of a manifest, so their bounds hold for it, too. Raises CommandError."""
    try:
        model.model_validate(fields)
    except ValidationError as error:
        raise CommandError(f"{option}: {describe(error)}", exit_codes.INVALID) from error


def world_of(manifests: Manifests, options: RunOptions, machine: Machine) -> RunInputs:
    """Raises CommandError when the manifests, with these options, make no run."""
    if manifests.problems:
        raise CommandError("\n".join(map(str, manifests.problems)), exit_codes.INVALID)
    if options.s3_endpoint is not None:
        _check(f"--s3-endpoint {options.s3_endpoint}", Storage, endpoint=options.s3_endpoint)
    try:
        return adapt(manifests, options, machine)
    except InvalidRun as error:
        raise CommandError(str(error), exit_codes.INVALID) from error
    except ValidationError as error:  # a number that no pipeline may have
        raise CommandError(describe(error), exit_codes.INVALID) from error


async def _run(
    world: RunInputs, place: RunEnvironment, audience: Audience, seconds: float | None
) -> list[End]:
    """SIGTERM ends the run as Ctrl-C does: with all its processes."""
    from mlora_operator.local.run import run as run_locally  # its HTTP client takes a second to load

    main = asyncio.current_task()
    assert main is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, main.cancel)
    try:
        async with asyncio.timeout(seconds):
            return await run_locally(world, place, audience)
    except asyncio.CancelledError:
        raise CommandError("interrupted", exit_codes.INTERRUPTED) from None


def log_to(file: Path) -> None:
    """The operator's log goes to a file: the terminal belongs to the progress bars."""
    handler = logging.FileHandler(file, encoding="utf-8")
    handler.setFormatter(TextLogLines())  # one record, one line, whatever a server or a worker says
    logger = logging.getLogger("mlora_operator")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False
