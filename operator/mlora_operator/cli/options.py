"""Options and arguments that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

from mlora_operator.cli.bare_options import FetchAddressing
from mlora_operator.cli.output import OutputFormat
from mlora_operator.cli.seconds import seconds


def duration(text: str) -> float:
    try:
        return seconds(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


FilesArgument = Annotated[
    list[str], typer.Argument(metavar="FILE", help="Manifest files; - is standard input.")
]
OutputOption = Annotated[
    OutputFormat,
    typer.Option("--output", "-o", help="text for people, json for programs (one object per line)."),
]
NamespaceOption = Annotated[
    str | None,
    typer.Option("--namespace", "-n", metavar="NAME", help="Namespace. Default: that of the context."),
]
AllNamespacesOption = Annotated[
    bool, typer.Option("--all-namespaces", "-A", help="All namespaces instead of one.")
]
ContextOption = Annotated[
    str | None, typer.Option("--context", metavar="NAME", help="Context of the kubeconfig to use.")
]
KubeconfigOption = Annotated[
    str | None,
    typer.Option(
        "--kubeconfig", metavar="FILE", help="Kubeconfig to use. Default: $KUBECONFIG, or ~/.kube/config."
    ),
]
AddressingOption = Annotated[
    FetchAddressing | None,
    typer.Option(help="Bucket in the path or in the host name; auto: in the path with an endpoint."),
]
NamesArgument = Annotated[list[str], typer.Argument(metavar="NAME", help="Names of LoRATasks.")]
TimeoutOption = Annotated[
    float | None,
    typer.Option(
        parser=duration, metavar="DURATION", help="Stop after this long, such as 90s or 1h30m (exit code 3)."
    ),
]
