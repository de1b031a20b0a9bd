"""What all commands share in speaking: ``--output``, and where errors go."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.console import Console


class Output(StrEnum):
    TEXT = "text"
    JSON = "json"


OutputOption = Annotated[
    Output, typer.Option("--output", help="text for people, json for programs (one object a line).")
]


class CommandError(Exception):
    """Ends the command with a message for people and a number for programs."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def stdout() -> Console:
    return Console(highlight=False, soft_wrap=True)


def stderr() -> Console:
    return Console(stderr=True, highlight=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """One line of JSON on standard output, at once."""
    print(json.dumps(value, allow_nan=False), flush=True)
