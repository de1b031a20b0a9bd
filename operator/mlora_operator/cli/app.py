"""All commands under one roof."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer
from rich.markup import escape

from mlora_operator.cli import output
from mlora_operator.cli.change.command import delete, resume, retry, suspend
from mlora_operator.cli.export import export
from mlora_operator.cli.fetch.in_app import fetch_in_app
from mlora_operator.cli.help_style import StyledCommand, StyledGroup
from mlora_operator.cli.init.command import init
from mlora_operator.cli.logs.command import logs
from mlora_operator.cli.plan.command import plan
from mlora_operator.cli.program import program
from mlora_operator.cli.report.command import report
from mlora_operator.cli.run.command import run
from mlora_operator.cli.show.get_command import get
from mlora_operator.cli.show.list_command import list_
from mlora_operator.cli.submit.command import submit
from mlora_operator.cli.sync.in_app import sync_in_app
from mlora_operator.cli.validate.command import validate
from mlora_operator.cli.watch import watch
from mlora_worker.lines import headed

app = typer.Typer(
    name="mlora",
    cls=StyledGroup,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,  # they may hold keys
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        try:
            known = version("mlora-operator")
        except PackageNotFoundError:
            known = "unknown (not installed as a package)"
        output.stdout().print(f"mlora {known}")
        raise typer.Exit


@app.callback()
def mlora(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train many LoRA adapters at once on one frozen base model."""


for command in (
    init,
    run,
    plan,
    validate,
    submit,
    list_,
    get,
    logs,
    watch,
    suspend,
    resume,
    retry,
    delete,
    fetch_in_app,
    sync_in_app,
    report,
    export,
):
    app.command(command.__name__.removesuffix("_in_app").rstrip("_"), cls=StyledCommand)(command)


def main() -> None:
    """An expected error is one line on standard error and a number, never a stack trace."""
    try:
        app(prog_name=program())
    except output.CommandError as error:
        output.stderr().print(f"[bold red]error:[/] {escape(headed(str(error)))}")
        sys.exit(error.exit_code)
