"""``mlora report``: a task's losses to TensorBoard, MLflow or Weights & Biases."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from mlora_operator.cli import exit_codes
from mlora_operator.cli.fetch.command import EXIT_CODES, is_name, manifest_of
from mlora_operator.cli.kube.choice import ClusterChoice
from mlora_operator.cli.options import (
    ContextOption,
    KubeconfigOption,
    NamespaceOption,
    OutputOption,
    TimeoutOption,
)
from mlora_operator.cli.output import CommandError, OutputFormat, print_json, stdout
from mlora_operator.cli.report.reporters import Reports
from mlora_operator.download import Access, DownloadError, open_source
from mlora_operator.reporting.curves import LibraryMissing, ReportError
from mlora_operator.reporting.published import finished_run
from mlora_operator.reporting.targets import FORMS, check_installed, open_reporter, target


def report(
    what: Annotated[
        str,
        typer.Argument(
            metavar="NAME|URI|FOLDER",
            help="LoRATask, s3://bucket/prefix of an adapter, or its folder (with a slash, as in ./support-bot).",
        ),
    ],
    to: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND:PLACE",
            help="tensorboard:FOLDER, mlflow:URL or wandb:PROJECT; may be repeated. Required.",
        ),
    ] = None,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow", help="Report losses while the task trains, until it finishes; requires a NAME."
        ),
    ] = False,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
    endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="S3 endpoint, if the task's endpoint cannot be reached from this machine."
        ),
    ] = None,
    timeout: TimeoutOption = None,
    output: OutputOption = OutputFormat.TEXT,
) -> None:
    """Report a task's losses to TensorBoard, MLflow or Weights & Biases. Repeated runs do not create duplicates."""
    if not to:
        message = f"--to is missing: write mlora report {what} --to KIND:PLACE, where KIND:PLACE is {FORMS}"
        raise CommandError(message, exit_codes.INVALID)
    try:
        targets = [target(text) for text in to]
    except ValueError as error:
        raise CommandError(str(error), exit_codes.INVALID) from error
    of_task = "/" not in what
    if of_task and not is_name(what):
        message = f"{what!r} is not the name of a task; write a folder with a slash, as in ./{what}"
        raise CommandError(message, exit_codes.INVALID)
    if follow and not of_task:
        raise CommandError(
            "--follow requires the name of a task: a published adapter is finished", exit_codes.INVALID
        )
    reports = Reports(targets, open_reporter, os.environ)
    try:
        for one in targets:  # before anything is waited for
            check_installed(one)
        if of_task:
            from mlora_operator.cli.fetch.adapter_of_task import adapter_of_task  # loads the cluster's client

            uri, access, uid = adapter_of_task(
                what,
                ClusterChoice(namespace, context, kubeconfig),
                endpoint,
                follow,
                timeout,
                reports.seen,
            )
        else:
            uri = what if "://" in what else Path(what).absolute().as_uri()
            access, uid = Access(endpoint=endpoint), None
        source = open_source(uri, access)
        finished = finished_run(source, manifest_of(source, uri, uid, wait=False, left=None))
        for kind, reporter in reports.of(finished.run):
            written = reporter.complete(finished)
            if output is OutputFormat.JSON:
                print_json(
                    {"kind": kind, "run": finished.run.title, "uid": finished.run.uid, "points": len(finished.points),
                     "new": written, "place": reporter.place()}
                )  # fmt: skip
            else:
                told = f"{written:,} of {len(finished.points):,} points are new"
                stdout().print(f"{kind}: {finished.run.title}: {told}; {reporter.place()}", markup=False)
    except CommandError as error:
        if not of_task or not Path(what).is_dir():
            raise
        message = f"{error}\n{what} is taken for the name of a task; for the adapter in the folder here write ./{what}"
        raise CommandError(message, error.exit_code) from error
    except DownloadError as error:
        raise CommandError(str(error), EXIT_CODES[type(error)]) from error
    except LibraryMissing as error:
        raise CommandError(str(error), exit_codes.INVALID) from error
    except ReportError as error:
        raise CommandError(str(error), exit_codes.UNREACHABLE) from error
    except ValueError as error:
        raise CommandError(str(error), exit_codes.INVALID) from error
