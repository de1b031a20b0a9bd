"""``mlora export``: a fetched adapter and its base as one model, or the adapter for llama.cpp or for servers."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from mlora_operator.cli import exit_codes
from mlora_operator.cli.options import OutputOption
from mlora_operator.cli.output import CommandError, OutputFormat, print_json, stdout
from mlora_operator.local.survey import GGUF, MERGE, PLAIN, SurveyFailed, merge
from mlora_worker.protocol import AdapterDtype, MergeQuestion

# Both folders are local: whatever they name, the libraries ask no hub for it.
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


@dataclass(frozen=True, slots=True)
class _Form:
    """``needed``: modules; ``packages``: what pip installs for them."""

    command: tuple[str, ...]
    done: str
    needed: tuple[str, ...]
    packages: str


_MERGED = _Form(MERGE, "merged", ("torch", "transformers", "peft"), "'mlora-operator[worker]' peft")
_GGUF = _Form(GGUF, "written", ("torch", "gguf"), "'mlora-operator[worker,gguf]'")
_PLAIN = _Form(PLAIN, "written", ("torch",), "'mlora-operator[worker]'")


def export(
    adapter: Annotated[Path, typer.Argument(metavar="ADAPTER", help="Folder that mlora fetch downloaded.")],
    output_folder: Annotated[Path, typer.Argument(metavar="PLACE", help="Folder or file to create.")],
    base: Annotated[Path, typer.Option(help="Folder of the base model, with safetensors.")],
    merged: Annotated[
        bool, typer.Option("--merged", help="Merge the adapter into the base model with PEFT.")
    ] = False,
    gguf: Annotated[
        bool, typer.Option("--gguf", help="Write the adapter alone as a GGUF file for llama.cpp.")
    ] = False,
    plain: Annotated[
        bool,
        typer.Option(
            "--plain", help="Write the adapter alone with one rank and alpha, and each expert's own matrices."
        ),
    ] = False,
    dtype: Annotated[
        AdapterDtype | None,
        typer.Option(
            help="Data type of the weights. Default: that of the base model, or float32 for GGUF, or the adapter's own."
        ),
    ] = None,
    output: OutputOption = OutputFormat.TEXT,
) -> None:
    """Convert a fetched adapter for programs that do not read all of PEFT.

    Merge it into its base, write GGUF, or write what every server of adapters reads.
    """
    forms = [form for asked, form in ((merged, _MERGED), (gguf, _GGUF), (plain, _PLAIN)) if asked]
    if len(forms) != 1:
        raise CommandError("give exactly one of --merged, --gguf and --plain", exit_codes.INVALID)
    [form] = forms
    lacking = [name for name in form.needed if importlib.util.find_spec(name) is None]
    if lacking:
        raise CommandError(
            f"{', '.join(lacking)} must be installed for this: pip install {form.packages}",
            exit_codes.INVALID,
        )
    question = MergeQuestion(
        adapter=str(adapter.absolute()),
        base=str(base.absolute()),
        output=str(output_folder.absolute()),
        dtype=dtype.value if dtype is not None else None,
    )
    try:
        answer = merge(question, {**os.environ, **_OFFLINE}, command=form.command)
    except SurveyFailed as error:
        raise CommandError(f"the adapter cannot be exported: {error}", exit_codes.FAILED) from error
    if answer.failure is not None:
        raise CommandError(answer.failure.message, exit_codes.INVALID)
    if output is OutputFormat.JSON:
        print_json(answer.model_dump(by_alias=True, mode="json", exclude_none=True))
    else:
        size = answer.bytes / 2**20
        stdout().print(f"[green]{form.done}:[/] {output_folder}, {size:,.1f} MiB in {answer.dtype}")
