"""``mlora sync`` among the other commands, with their help; where typer is missing, argparse reads the same options."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Annotated

import typer

from mlora_operator.cli import exit_codes
from mlora_operator.cli.options import (
    AddressingOption,
    AllNamespacesOption,
    ContextOption,
    KubeconfigOption,
    NamespaceOption,
    OutputOption,
    duration,
)
from mlora_operator.cli.output import CommandError, OutputFormat
from mlora_operator.cli.sync.command import sync


def sync_in_app(
    output_dir: Annotated[Path, typer.Option("--output-dir", "-d", metavar="DIR", help="Folder to keep.")],
    uris: Annotated[
        list[str] | None,
        typer.Argument(metavar="URI", help="s3://bucket/prefix with adapters directly below it, or of one."),
    ] = None,
    selector: Annotated[
        str | None,
        typer.Option(
            "--selector", "-l", metavar="LABELS", help="LoRATasks with these labels, as in kubectl."
        ),
    ] = None,
    servers: Annotated[
        list[str] | None,
        typer.Option(
            "--server",
            metavar="KIND=URL",
            help="Server to load them into: vllm=URL or sglang=URL; can be given several times.",
        ),
    ] = None,
    server_dir: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Where the servers see the folder, if elsewhere than here."),
    ] = None,
    base_model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only adapters of this base model.")
    ] = None,
    prune: Annotated[bool, typer.Option("--prune", help="Remove what the store no longer has.")] = False,
    once: Annotated[bool, typer.Option("--once", help="End after one pass.")] = False,
    every: Annotated[
        float | None,
        typer.Option(parser=duration, metavar="DURATION", help="Time between two passes. Default: 30s."),
    ] = None,
    endpoint: Annotated[str | None, typer.Option(metavar="URL", help="S3 endpoint.")] = None,
    addressing: AddressingOption = None,
    namespace: NamespaceOption = None,
    all_namespaces: AllNamespacesOption = False,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
    output: OutputOption = OutputFormat.TEXT,
) -> None:
    """Keep a folder, and servers, in step with finished adapters.

    They are those below addresses of a store, or those of a cluster's tasks with given labels. Each is verified against its
    manifest and replaced in one step. With addresses, the keys come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or
    from any other source of the AWS SDK; this needs only boto3.
    """
    options = argparse.Namespace(
        uris=uris or [],
        output_dir=output_dir,
        selector=selector,
        servers=servers or [],
        server_dir=server_dir,
        base_model=base_model,
        prune=prune,
        once=once,
        every=every,
        endpoint=endpoint,
        addressing=addressing.value if addressing is not None else None,
        namespace=namespace,
        all_namespaces=all_namespaces,
        context=context,
        kubeconfig=kubeconfig,
        output=output.value,
    )
    try:
        raise typer.Exit(sync(options))
    except KeyboardInterrupt:
        raise CommandError("interrupted", exit_codes.INTERRUPTED) from None
