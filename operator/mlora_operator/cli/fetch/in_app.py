"""``mlora fetch`` among the other commands, with their help; where typer is missing, argparse reads the same options."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Annotated

import typer

from mlora_operator.cli import exit_codes
from mlora_operator.cli.fetch.command import fetch, requested_output
from mlora_operator.cli.options import (
    AddressingOption,
    ContextOption,
    KubeconfigOption,
    NamespaceOption,
    TimeoutOption,
)
from mlora_operator.cli.output import CommandError


def fetch_in_app(
    what: Annotated[
        str, typer.Argument(metavar="NAME|URI", help="LoRATask, or s3://bucket/prefix of an adapter.")
    ],
    output_dir: Annotated[
        Path | None,
        typer.Option(
            "--output-dir",
            "-d",
            metavar="DIR",
            help="Folder to create. Default: the last part of the address.",
        ),
    ] = None,
    endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="S3 endpoint, if the task's endpoint cannot be reached from this machine."
        ),
    ] = None,
    addressing: AddressingOption = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the adapter is finished.")] = False,
    timeout: TimeoutOption = None,
    uid: Annotated[
        str | None, typer.Option(help="Accept only the adapter of the LoRATask with this uid.")
    ] = None,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
    output: Annotated[
        str,
        typer.Option("--output", "-o", metavar="text|json", help="text for people, json for programs."),
    ] = "text",
) -> None:
    """Download a finished adapter and verify it against its manifest.

    With a name, the address and the keys come from the cluster. With an address, the keys come from AWS_ACCESS_KEY_ID
    and AWS_SECRET_ACCESS_KEY, or from any other source of the AWS SDK; this needs only boto3.
    """
    options = argparse.Namespace(
        what=what,
        output_dir=output_dir,
        endpoint=endpoint,
        addressing=addressing.value if addressing is not None else None,
        wait=wait,
        timeout=timeout,
        uid=uid,
        namespace=namespace,
        context=context,
        kubeconfig=kubeconfig,
        output=output,
    )
    try:
        fetch(requested_output(options))
    except KeyboardInterrupt:
        message = "interrupted; run the same command again to resume"
        raise CommandError(message, exit_codes.INTERRUPTED) from None
