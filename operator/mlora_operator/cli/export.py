"""``mlora export --merged``: a fetched adapter and its base as one model."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Annotated

import typer

from mlora_operator.cli import exit_codes
from mlora_operator.cli.output import CommandError, Output, print_json, stdout
from mlora_operator.local.survey import SurveyFailed, merge
from mlora_worker.protocol import AdapterDtype, MergeQuestion


def export(
    adapter: Annotated[Path, typer.Argument(help="Folder of an adapter, as mlora fetch leaves it.")],
    output_folder: Annotated[Path, typer.Argument(help="Folder to make; it may not be there yet.")],
    base: Annotated[Path, typer.Option(help="Folder of the base model, with safetensors.")],
    merged: Annotated[
        bool, typer.Option("--merged", help="The only kind of export: a whole model with the adapter in it.")
    ] = False,
    dtype: Annotated[
        AdapterDtype | None, typer.Option(help="Type of the weights; by default that of the base.")
    ] = None,
    output: Annotated[Output, typer.Option(help="How the answer is printed.")] = Output.TEXT,
) -> None:
    """Write a model that needs no adapter: the base with a fetched adapter merged into it by PEFT."""
    if not merged:
        raise CommandError("say --merged: there is no other kind of export", exit_codes.INVALID)
    lacking = [name for name in ("torch", "transformers", "peft") if importlib.util.find_spec(name) is None]
    if lacking:
        raise CommandError(
            f"merging needs {', '.join(lacking)}: pip install 'mlora-operator[worker]' peft",
            exit_codes.INVALID,
        )
    question = MergeQuestion(
        adapter=str(adapter.absolute()),
        base=str(base.absolute()),
        output=str(output_folder.absolute()),
        dtype=dtype.value if dtype is not None else None,
    )
    try:
        answer = merge(question, dict(os.environ))
    except SurveyFailed as error:
        raise CommandError(f"the adapter cannot be merged: {error}", exit_codes.FAILED) from error
    if answer.failure is not None:
        raise CommandError(answer.failure.message, exit_codes.INVALID)
    if output is Output.JSON:
        print_json(answer.model_dump(by_alias=True, mode="json", exclude_none=True))
    else:
        stdout().print(
            f"[green]merged:[/] {output_folder}, {answer.bytes / 2**20:,.1f} MiB in {answer.dtype}"
        )
