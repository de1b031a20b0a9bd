"""``mlora fetch``: a finished adapter into a folder, by the task's name or by its address."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from mlora_operator.api.task import LoRATaskSpec
from mlora_operator.cli import exit_codes
from mlora_operator.cli.options import ContextOption, NamespaceOption, OutputOption
from mlora_operator.cli.output import CommandError, Output, print_json, stderr, stdout
from mlora_operator.download import (
    Access,
    AdapterCorrupt,
    AdapterNotFound,
    DownloadError,
    FolderInUse,
    StoreRefused,
    download,
    open_source,
    read_manifest,
)

_CODES: dict[type[DownloadError], int] = {
    AdapterNotFound: exit_codes.NOT_FOUND,
    StoreRefused: exit_codes.UNREACHABLE,
    AdapterCorrupt: exit_codes.CORRUPT,
    FolderInUse: exit_codes.INVALID,
}


def fetch(
    what: Annotated[
        str,
        typer.Argument(metavar="NAME|URI", help="Name of a LoRATask, or s3://bucket/prefix of an adapter."),
    ],
    target: Annotated[
        Path | None,
        typer.Option("--output-dir", "-o", help="Folder to make; by default the last part of the address."),
    ] = None,
    endpoint: Annotated[
        str | None,
        typer.Option(help="S3 endpoint, where that of the task has no meaning on this machine."),
    ] = None,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Download a finished adapter and verify it against its manifest.

    With a name, the address and the keys come from the cluster. With an address, the keys come from
    AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or whatever else the AWS SDK finds.
    """
    expected_uid = None
    if "://" in what:
        uri, access = what, Access(endpoint=endpoint)
    else:
        uri, access, expected_uid = asyncio.run(_find(what, namespace, context, endpoint))
    folder = target if target is not None else Path(uri.rstrip("/").rsplit("/", 1)[-1])
    try:
        source = open_source(uri, access)
        manifest = read_manifest(source)
        if expected_uid is not None and manifest.task_uid != expected_uid:
            message = f"{uri} holds the adapter of another task: {manifest.namespace}/{manifest.name}"
            raise CommandError(message, exit_codes.NOT_FOUND)
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        quiet = output is Output.JSON
        with Progress(*columns, console=stderr(), transient=True, disable=quiet) as progress:
            bar = progress.add_task("fetching", total=sum(file.bytes for file in manifest.files))
            download(source, manifest, folder, lambda size: progress.advance(bar, size))
    except ValueError as error:
        raise CommandError(str(error), exit_codes.INVALID) from error
    except DownloadError as error:
        raise CommandError(str(error), _CODES[type(error)]) from error
    if output is Output.JSON:
        print_json({"uri": uri, "folder": str(folder), **manifest.model_dump(mode="json", by_alias=True)})
    else:
        size = sum(file.bytes for file in manifest.files)
        stdout().print(
            f"[green]verified:[/] {escape(str(folder))} ({len(manifest.files)} files, {size:,} bytes, "
            f"base model {escape(manifest.base_model)}, {manifest.step} steps)"
        )


async def _find(
    name: str, namespace: str | None, context: str | None, endpoint: str | None
) -> tuple[str, Access, str]:
    """Address, access and uid of a finished task's adapter. Raises CommandError."""
    from mlora_operator.cli.cluster import connect

    async with connect(context, namespace) as cluster:
        found = await cluster.task(name)
        spec = LoRATaskSpec.model_validate(found["spec"])
        status = found.get("status", {})
        if not any(c["type"] == "Succeeded" and c["status"] == "True" for c in status.get("conditions", [])):
            state = status.get("state", "not yet looked at by the operator")
            raise CommandError(f"loratask/{name} has no adapter yet: it is {state}", exit_codes.NOT_FOUND)
        keys: Mapping[str, str] = {}
        if spec.storage.secret_ref is not None:
            keys = await cluster.secret(spec.storage.secret_ref.name)
    access = access_to(spec, keys, endpoint)
    return status.get("adapter", {}).get("uri", spec.output.uri), access, found["metadata"]["uid"]


def access_to(spec: LoRATaskSpec, keys: Mapping[str, str], endpoint: str | None) -> Access:
    """How to reach a task's store with its Secret's keys. Raises CommandError when a key is missing."""
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    if spec.storage.secret_ref is not None:
        for name in names:
            if not keys.get(name, "").strip():
                message = f"secret/{spec.storage.secret_ref.name} has no {name}"
                raise CommandError(message, exit_codes.UNREACHABLE)
    return Access(
        endpoint=endpoint or spec.storage.endpoint,
        region=spec.storage.region,
        access_key=keys[names[0]].strip() if keys else None,
        secret_key=keys[names[1]].strip() if keys else None,
        session_token=keys.get("AWS_SESSION_TOKEN", "").strip() or None,
        anonymous=not keys,
    )
