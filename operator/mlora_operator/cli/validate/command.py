"""``mlora validate``: what the API server would say to the files, before it is asked."""

from __future__ import annotations

import io
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from mlora_operator.cli import exit_codes
from mlora_operator.cli.options import OutputOption
from mlora_operator.cli.output import CommandError, OutputFormat, print_json, stderr, stdout
from mlora_operator.cli.validate.data_check import exit_code, looked_at, print_answer, question_of
from mlora_operator.local.manifests import Manifest, Manifests, read_manifests
from mlora_worker.protocol import DatasetFormat, FileFormat, TrainOn


def validate(
    files: Annotated[
        list[str] | None, typer.Argument(metavar="FILE", help="Manifest files; - is standard input.")
    ] = None,
    output: OutputOption = OutputFormat.TEXT,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="A file of rows, - or its address: show what a task would train on."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="With --data: the base model's name in a given LoRAPipeline, or its folder."),
    ] = None,
    format: Annotated[
        DatasetFormat | None, typer.Option(help="With --data: value of dataset.format.")
    ] = None,
    file_format: Annotated[
        FileFormat | None, typer.Option(help="With --data: value of dataset.fileFormat.")
    ] = None,
    field: Annotated[
        list[str] | None,
        typer.Option(help="With --data: NAME=COLUMN, as in dataset.fields; may be repeated."),
    ] = None,
    train_on: Annotated[TrainOn | None, typer.Option(help="With --data: value of dataset.trainOn.")] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="With --data: a file with a chat template, as dataset.chatTemplate.")
    ] = None,
    max_seq_length: Annotated[
        int | None, typer.Option(min=2, help="With --data: value of training.maxSeqLength.")
    ] = None,
    s3_endpoint: Annotated[
        str | None,
        typer.Option(metavar="URL", help="With --data: S3 endpoint that replaces those in the files."),
    ] = None,
    show: Annotated[int, typer.Option(min=0, max=100, help="With --data: number of rows to show.")] = 3,
) -> None:
    """Check manifests of LoRATasks, LoRAPipelines and Secrets without a cluster.

    The same schema and rules as in the cluster decide. Each problem is printed with file, line and field. With --data, a
    file of rows is read, rendered and tokenised as for training, too; settings that are not given come from the only
    LoRATask in the files, if there is one.
    """
    if not files and data is None:
        raise CommandError("give manifest files, or rows with --data and --model", exit_codes.INVALID)
    if (data is None) != (model is None):
        raise CommandError("--data and --model must be given together", exit_codes.INVALID)
    manifests = read_manifests(read_texts(files or []))
    if files and manifests == Manifests():  # such as of a pipe whose program failed
        raise CommandError("these files contain no objects", exit_codes.INVALID)
    answer = None
    if data is not None and model is not None and not manifests.problems:
        options = {
            "format": format,
            "fileFormat": file_format,
            "trainOn": train_on,
            "maxSeqLength": max_seq_length,
            "chatTemplate": read_texts([str(chat_template)])[0][1] if chat_template is not None else None,
        }
        question = question_of(manifests, data, model, options, field or [], show, s3_endpoint=s3_endpoint)
        answer = looked_at(question)
    failure = answer.failure if answer is not None else None
    if output is OutputFormat.JSON:
        looked = {"data": answer.model_dump(by_alias=True, mode="json", exclude_none=True)} if answer else {}
        print_json(as_json(manifests) | looked)
    else:
        if files:
            _print(manifests)
        if failure is not None:
            stderr().print(f"[red]{failure.reason.value}: {escape(failure.message)}[/]")
        elif answer is not None:
            print_answer(answer)
    raise typer.Exit(exit_codes.INVALID if manifests.problems else exit_code(answer))


def read_texts(files: list[str]) -> list[tuple[str, str]]:
    """Name and content of each file. Raises CommandError when one cannot be read."""
    texts = []
    for file in files:
        try:
            text = _standard_input() if file == "-" else Path(file).read_text(encoding="utf-8")
        except OSError as error:
            raise CommandError(f"{file}: {error.strerror}", exit_codes.INVALID) from error
        except UnicodeDecodeError as error:
            raise CommandError(
                f"{file}: not a text file in UTF-8: save it in that encoding", exit_codes.INVALID
            ) from error
        texts.append(("standard input" if file == "-" else file, text))
    return texts


def _standard_input() -> str:
    """In UTF-8, as files are, whatever encoding the terminal has."""
    return io.StringIO(sys.stdin.buffer.read().decode("utf-8"), newline=None).read()


def as_json(manifests: Manifests) -> dict[str, Any]:
    ours: list[Manifest] = [*manifests.tasks, *manifests.pipelines, *manifests.secrets]
    return {
        "valid": not manifests.problems,
        "objects": [asdict(one.place) for one in ours],
        "ignored": [asdict(place) for place in manifests.others],
        "problems": [asdict(problem) for problem in manifests.problems],
    }


def _print(manifests: Manifests) -> None:
    for place in manifests.others:
        where, what = f"{place.file}:{place.line}", f"{place.kind}/{place.name}"
        stderr().print(f"[dim]{escape(where)}: {escape(what)} is not an mLoRA object and was not checked[/]")
    for problem in manifests.problems:
        stderr().print(f"[red]{escape(str(problem))}[/]")
    counts = {
        "LoRATask": len(manifests.tasks),
        "LoRAPipeline": len(manifests.pipelines),
        "Secret": len(manifests.secrets),
    }
    good = ", ".join(f"{count} {kind}{'s' * (count > 1)}" for kind, count in counts.items() if count)
    if manifests.problems:
        plural = "s" * (len(manifests.problems) > 1)
        stderr().print(f"[bold red]{len(manifests.problems)} problem{plural}[/]")
    else:
        stdout().print(f"[green]valid:[/] {good or 'no mLoRA objects'}")
