"""``mlora fetch``: a finished adapter into a folder, by the task's name or by its address.

By address it needs boto3 and the standard library alone, so its options are read by argparse. By name it asks the
cluster, through the packages of the extra ``operator``.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from mlora_operator.cli import exit_codes
from mlora_operator.cli.bare_options import (
    add_addressing,
    add_kubeconfig,
    check_boto3,
    check_cluster_packages,
    duration,
)
from mlora_operator.cli.kube.choice import ClusterChoice
from mlora_operator.cli.output import CommandError, print_json
from mlora_operator.cli.program import program
from mlora_operator.download import (
    Access,
    AdapterCorrupt,
    AdapterNotFound,
    AdapterSource,
    DownloadError,
    FolderInUse,
    Manifest,
    StoreRefused,
    StoreSilent,
    await_manifest,
    download,
    open_source,
    read_manifest,
)
from mlora_worker.lines import headed, one_line

_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")


EXIT_CODES: dict[type[DownloadError], int] = {
    AdapterNotFound: exit_codes.NOT_FOUND,
    StoreRefused: exit_codes.UNREACHABLE,
    StoreSilent: exit_codes.UNREACHABLE,
    AdapterCorrupt: exit_codes.CORRUPT,
    FolderInUse: exit_codes.INVALID,
}


def main(arguments: Sequence[str]) -> int:
    """The exit code; errors are told on standard error."""
    try:
        fetch(requested_output(parser().parse_args(arguments)))
    except CommandError as error:
        print(f"error: {headed(str(error))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted; run the same command again to resume", file=sys.stderr)
        return exit_codes.INTERRUPTED
    return exit_codes.OK


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        prog=f"{program()} fetch",
        description="Download a finished adapter and verify it against its manifest. With a name, the address and the "
        "keys come from the cluster. With an address, the keys come from AWS_ACCESS_KEY_ID and "
        "AWS_SECRET_ACCESS_KEY, "
        "or from any other source of the AWS SDK; this needs only boto3.",
    )
    options.add_argument("what", metavar="NAME|URI", help="LoRATask, or s3://bucket/prefix of an adapter")
    options.add_argument(
        "-d",
        "--output-dir",
        type=Path,
        metavar="DIR",
        help="folder to create (default: the last part of the address)",
    )
    options.add_argument(
        "--endpoint",
        metavar="URL",
        help="S3 endpoint, if the task's endpoint cannot be reached from this machine",
    )
    add_addressing(options)
    options.add_argument("--wait", action="store_true", help="wait until the adapter is finished")
    options.add_argument(
        "--timeout", type=duration, metavar="DURATION", help="stop waiting after this long (exit code 3)"
    )
    options.add_argument("--uid", help="accept only the adapter of the LoRATask with this uid")
    options.add_argument(
        "-n", "--namespace", help="namespace of the task (default: the namespace of the context)"
    )
    add_kubeconfig(options)
    options.add_argument(
        "-o", "--output", metavar="text|json", default="text", help="text for people, json for programs"
    )
    return options


def requested_output(options: argparse.Namespace) -> argparse.Namespace:
    """``options`` whose ``output`` is text or json. Before -o meant the same as in all other commands, it was the
    folder: what is neither is still taken as one.
    """
    if options.output not in ("text", "json"):
        if options.output_dir is not None:
            raise CommandError(f"-o {options.output}: give text or json", exit_codes.INVALID)
        print("note: -o is the format of the output; give the folder with -d DIR", file=sys.stderr)
        options.output_dir, options.output = Path(options.output), "text"
    return options


def fetch(options: argparse.Namespace) -> None:
    """Raises CommandError."""
    start = time.monotonic()
    uid = options.uid
    if "://" in options.what:
        uri = options.what
        access = Access(endpoint=options.endpoint, addressing=options.addressing or "auto")
    elif not is_name(options.what):
        raise CommandError(
            f"{options.what!r} is neither a task's name nor an address such as s3://bucket/prefix",
            exit_codes.INVALID,
        )
    else:
        uri, access, uid = _of_task(options)
    folder = options.output_dir or Path(uri.rstrip("/").rsplit("/", 1)[-1])
    check_boto3([uri])
    try:
        source = open_source(uri, access)
        left = None if options.timeout is None else max(0.0, options.timeout - (time.monotonic() - start))
        manifest = manifest_of(source, uri, uid, options.wait, left)
        meter = _Meter(manifest.bytes, shown=options.output == "text" and sys.stderr.isatty())
        download(source, manifest, folder, time.sleep, meter.advance)
        meter.clear()
    except ValueError as error:
        raise CommandError(str(error), exit_codes.INVALID) from error
    except TimeoutError as error:
        raise CommandError(
            f"gave up after {options.timeout:g} seconds: {error}", exit_codes.TIMEOUT
        ) from error
    except DownloadError as error:
        raise CommandError(str(error), EXIT_CODES[type(error)]) from error
    if options.output == "json":
        print_json({"uri": uri, "folder": str(folder), **manifest.as_json()})
    else:
        told = (
            f"verified: {folder} ({len(manifest.files)} files, {manifest.bytes:,} bytes, base model "
            f"{manifest.base_model}, {manifest.step} steps)"
        )
        print(one_line(told))


def is_name(text: str) -> bool:
    """Whether an object of Kubernetes may be called so."""
    return len(text) <= 253 and _NAME.fullmatch(text) is not None


def manifest_of(source: AdapterSource, uri: str, uid: str | None, wait: bool, left: float | None) -> Manifest:
    """Of the adapter at ``uri``, which is that of task ``uid``. Raises CommandError, DownloadError, TimeoutError."""
    if wait:
        return await_manifest(
            source, lambda found: uid in (None, found.task_uid), left, time.monotonic, time.sleep
        )
    manifest = read_manifest(source)
    if uid not in (None, manifest.task_uid):
        message = f"{uri} holds the adapter of another task: {manifest.namespace}/{manifest.name}"
        raise CommandError(message, exit_codes.NOT_FOUND)
    return manifest


def _of_task(options: argparse.Namespace) -> tuple[str, Access, str]:
    """Address, access and uid of a task's adapter."""
    check_cluster_packages(
        f"{options.what!r} is the name of a task, and reading it from a cluster needs more packages: run pip install "
        "'mlora-operator[operator]', or give the adapter's s3:// address"
    )
    from mlora_operator.cli.fetch.adapter_of_task import adapter_of_task

    choice = ClusterChoice(options.namespace, options.context, options.kubeconfig)
    return adapter_of_task(options.what, choice, options.endpoint, options.wait, options.timeout)


class _Meter:
    """How much has come, in one line of a terminal that is written over."""

    def __init__(self, total: int, shown: bool) -> None:
        self._total = total
        self._shown = shown
        self._done = 0

    def advance(self, size: int) -> None:
        self._done += size
        if self._shown:
            megabytes = f"{self._done / 1e6:,.1f} of {self._total / 1e6:,.1f} MB"
            print(f"\rfetching {megabytes}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
