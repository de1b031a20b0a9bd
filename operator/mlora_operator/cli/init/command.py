"""``mlora init``: a task to begin with, for a model and a file of rows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from mlora_operator.cli import exit_codes
from mlora_operator.cli.init.rows import first_rows
from mlora_operator.cli.init.template import TaskDraft, text_of
from mlora_operator.cli.output import CommandError, stderr
from mlora_operator.local.manifests import read_manifests
from mlora_worker.lines import one_line
from mlora_worker.protocol import DatasetFormat, FormatNotDetected, NamedFormat, detected_format, keys_of

_NOT_OF_A_NAME = re.compile(r"[^a-z0-9]+")


def init(
    model: Annotated[
        str, typer.Option(metavar="NAME", help="Base model: its name, its folder, or its hf:// address.")
    ],
    data: Annotated[
        str, typer.Option(metavar="FILE", help="Rows to train on: a file, or an s3, https or hf address.")
    ],
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="Manifest file to write; - is standard output.")
    ] = "task.yaml",
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the task. Default: as the rows' file.")
    ] = None,
    format: Annotated[
        DatasetFormat | None,
        typer.Option(help="Value of dataset.format. Default: as the rows' columns tell."),
    ] = None,
    field: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=COLUMN", help="With --format: as in dataset.fields; may be repeated."),
    ] = None,
    output_uri: Annotated[
        str | None,
        typer.Option(metavar="URI", help="Folder for the adapter. Default: one with the task's name."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
) -> None:
    """Write a LoRATask with comments, with the format and the columns of the given rows."""
    base, place = _model(model)
    there = Path(data)
    rows: list[dict[str, Any]] = []
    if "://" not in data:
        if not there.is_file():
            raise CommandError(f"--data {data}: {_no_file(there)}", exit_codes.INVALID)
        rows = first_rows(there) if format is None else []
    called = name if name is not None else _name(data)
    if output_uri is None:
        here = (Path.cwd() / "adapters" / called).as_uri()
        output_uri = here if "://" not in data else f"s3://adapters/{called}"
    draft = TaskDraft(
        file=file,
        name=called,
        base_model=base,
        model_place=place,
        data=data,
        data_uri=data if "://" in data else there.absolute().as_uri(),
        output_uri=output_uri,
        rows=_format(data, rows, format, field or []),
        columns=keys_of(rows),
    )
    text = text_of(draft)
    problems = read_manifests([(file, text)]).problems
    if problems:
        raise CommandError("\n".join(str(problem) for problem in problems), exit_codes.INVALID)
    _write(file, text, force=force)
    if file != "-":
        told = f"wrote {file} with format {draft.rows.format.value}; next: mlora validate {shlex.quote(file)}"
        stderr().print(Text(one_line(told)))


def _model(model: str) -> tuple[str, str | None]:
    """The name that a task gives, and where the model is, as far as that is known."""
    if model.startswith("hf://"):
        return model.removeprefix("hf://").partition("@")[0], model
    if Path(model).is_dir():
        return Path(model).resolve().name, model
    if "://" in model:
        return model.rstrip("/").rsplit("/", 1)[-1], model
    return model, None


def _no_file(path: Path) -> str:
    if path.is_dir():
        return "it is a folder: give a file of rows"
    if path.exists() or str(path) == "-":
        return "rows cannot come from a pipe here, since the task has to name their place: give a file"
    return "no such file"


def _name(data: str) -> str:
    """A name of Kubernetes that reads like the file's."""
    stem = data.rstrip("/").rsplit("/", 1)[-1].split(".")[0].lower()
    return _NOT_OF_A_NAME.sub("-", stem).strip("-")[:63].rstrip("-") or "task"


def _format(
    data: str, rows: list[dict[str, Any]], format: DatasetFormat | None, fields: list[str]
) -> NamedFormat:
    """As the worker detects it; columns with other names are guessed, since the user reads what is written here. Raises
    CommandError when it is not given and cannot be detected."""
    if format is not None:
        return NamedFormat(format, dict(_pair(one) for one in fields))
    if fields:
        raise CommandError("--field needs --format", exit_codes.INVALID)
    if not rows:  # they are elsewhere
        raise CommandError(
            f"{data} is not a file of this machine, so its rows are not read: give --format",
            exit_codes.INVALID,
        )
    try:
        return NamedFormat(detected_format(rows))
    except FormatNotDetected as error:
        if error.suggestion is not None:
            return error.suggestion
        raise CommandError(f"{data}: {error} (here: --format and --field)", exit_codes.INVALID) from None


def _pair(field: str) -> tuple[str, str]:
    name, equals, column = field.partition("=")
    if not equals:
        raise CommandError(f"--field {field}: write NAME=COLUMN, such as prompt=question", exit_codes.INVALID)
    return name, column


def _write(file: str, text: str, *, force: bool) -> None:
    if file == "-":
        print(text, end="")
        return
    path = Path(file)
    special = path.exists() and not path.is_file()  # a pipe or a terminal is not replaced by writing to it
    try:
        with path.open("w" if force or special else "x", encoding="utf-8") as target:
            target.write(text)
    except FileExistsError:
        raise CommandError(f"{file} exists: give --force to replace it", exit_codes.INVALID) from None
    except OSError as error:
        raise CommandError(f"{file}: {error.strerror}", exit_codes.INVALID) from error
