"""What all commands share in speaking: text or JSON, and where errors go."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console  # not there where `mlora fetch` is all that is installed


class OutputFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


class CommandError(Exception):
    """Ends the command with a message for people and a number for programs."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def stdout() -> Console:
    from mlora_operator.cli.console import CleanConsole

    return CleanConsole(highlight=False, soft_wrap=True)


def stderr() -> Console:
    from mlora_operator.cli.console import CleanConsole

    return CleanConsole(stderr=True, highlight=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """One line of JSON on standard output, at once."""
    print(json.dumps(value, allow_nan=False), flush=True)
