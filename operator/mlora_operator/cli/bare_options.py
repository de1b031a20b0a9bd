"""What ``mlora fetch`` and ``mlora sync`` share where argparse reads their options: they run with boto3 alone."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterable
from enum import StrEnum

from mlora_operator.cli import exit_codes
from mlora_operator.cli.output import CommandError
from mlora_operator.cli.seconds import seconds


class FetchAddressing(StrEnum):
    AUTO = "auto"
    PATH = "path"
    VIRTUAL = "virtual"


def add_addressing(options: argparse.ArgumentParser) -> None:
    options.add_argument(
        "--addressing",
        choices=[one.value for one in FetchAddressing],
        help="bucket in the path or in the host name; auto: in the path with an endpoint",
    )


def add_kubeconfig(options: argparse.ArgumentParser) -> None:
    options.add_argument("--context", help="context of the kubeconfig to use")
    options.add_argument("--kubeconfig", metavar="FILE", help="kubeconfig to use")


def duration(text: str) -> float:
    """The type of an option, in seconds."""
    try:
        return seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def check_boto3(uris: Iterable[str]) -> None:
    """Raises CommandError where one of ``uris`` needs it and it is not installed."""
    if any(uri.startswith("s3://") for uri in uris) and importlib.util.find_spec("boto3") is None:
        raise CommandError("boto3 is not installed: pip install boto3", exit_codes.INVALID)


def check_cluster_packages(message: str) -> None:
    """Raises CommandError with ``message`` where what asks a cluster is not installed."""
    if any(importlib.util.find_spec(module) is None for module in ("kubernetes", "pydantic")):
        raise CommandError(message, exit_codes.INVALID)
