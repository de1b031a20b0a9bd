"""Options and arguments that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

from mlora_operator.cli.output import OutputFormat
from mlora_operator.cli.seconds import seconds


def duration(text: str) -> float:
    try:
        return seconds(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


FilesArgument = Annotated[
    list[str], typer.Argument(metavar="FILE...", help="Manifest files; - is standard input.")
]
OutputOption = Annotated[
    OutputFormat,
    typer.Option("--output", "-o", help="text for people, json for programs (one object per line)."),
]
NamespaceOption = Annotated[
    str | None, typer.Option("--namespace", "-n", help="Namespace. Default: that of the context.")
]
ContextOption = Annotated[str | None, typer.Option("--context", help="Context of the kubeconfig to use.")]
TimeoutOption = Annotated[
    float | None,
    typer.Option(
        parser=duration, metavar="DURATION", help="Stop after this long, such as 90s or 1h30m (exit code 3)."
    ),
]
