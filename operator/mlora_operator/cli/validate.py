"""``mlora validate``: what the API server would say to the files, before it is asked."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape

from mlora_operator.cli import exit_codes
from mlora_operator.cli.options import FilesArgument, OutputOption
from mlora_operator.cli.output import CommandError, Output, print_json, stderr, stdout
from mlora_operator.local.manifests import Manifest, Manifests, read_manifests


def validate(files: FilesArgument, output: OutputOption = Output.TEXT) -> None:
    """Check manifests of LoRATasks, LoRAPipelines and Secrets without a cluster.

    The same schema and rules as in the cluster decide. Each problem is printed with file, line and field.
    """
    manifests = read_manifests(read_texts(files))
    if output is Output.JSON:
        print_json(as_json(manifests))
    else:
        _print(manifests)
    raise typer.Exit(exit_codes.INVALID if manifests.problems else exit_codes.OK)


def read_texts(files: list[str]) -> list[tuple[str, str]]:
    """Name and content of each file. Raises CommandError when one cannot be read."""
    texts = []
    for file in files:
        try:
            text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
        except OSError as error:
            raise CommandError(f"{file}: {error.strerror}", exit_codes.INVALID) from error
        except UnicodeDecodeError as error:
            raise CommandError(f"{file}: not a text file", exit_codes.INVALID) from error
        texts.append(("standard input" if file == "-" else file, text))
    return texts


def as_json(manifests: Manifests) -> dict[str, Any]:
    ours: list[Manifest] = [*manifests.tasks, *manifests.pipelines, *manifests.secrets]
    return {
        "valid": not manifests.problems,
        "objects": [asdict(one.place) for one in ours],
        "ignored": [asdict(place) for place in manifests.others],
        "problems": [asdict(problem) for problem in manifests.problems],
    }


def _print(manifests: Manifests) -> None:
    for place in manifests.others:
        where, what = f"{place.file}:{place.line}", f"{place.kind}/{place.name}"
        stderr().print(f"[dim]{escape(where)}: {escape(what)} is not mLoRA's: not checked[/]")
    for problem in manifests.problems:
        stderr().print(f"[red]{escape(str(problem))}[/]")
    counts = {
        "LoRATask": len(manifests.tasks),
        "LoRAPipeline": len(manifests.pipelines),
        "Secret": len(manifests.secrets),
    }
    good = ", ".join(f"{count} {kind}{'s' * (count > 1)}" for kind, count in counts.items() if count)
    if manifests.problems:
        plural = "s" * (len(manifests.problems) > 1)
        stderr().print(f"[bold red]{len(manifests.problems)} problem{plural}[/]")
    else:
        stdout().print(f"[green]valid:[/] {good or 'nothing of mLoRA'}")
