"""``mlora validate --data``: what a task would learn from a file, shown before anything is trained."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.text import Text

from mlora_operator.api.meta import Storage
from mlora_operator.api.problem import describe
from mlora_operator.cli import exit_codes
from mlora_operator.cli.output import CommandError, stdout
from mlora_operator.cli.pipes import as_file
from mlora_operator.local.access import access_to
from mlora_operator.local.manifests import Manifests
from mlora_operator.local.survey import SurveyFailed, look
from mlora_worker.protocol import (
    HUB_ENDPOINT,
    DatasetSpec,
    FailureReason,
    LookAnswer,
    LookQuestion,
    ModelSource,
    StorageAccess,
    TrainingSpec,
)

_BAR = 40  # characters of the longest


def question_of(
    manifests: Manifests,
    data: str,
    model: str,
    options: Mapping[str, Any],
    fields: Sequence[str],
    show: int,
    *,
    s3_endpoint: str | None = None,
    environment: Mapping[str, str] = os.environ,
) -> LookQuestion:
    """Settings and the rows' store come from the files' only LoRATask, if there is one; ``options`` (camelCase) and
    ``fields`` (name=column) win over them. ``s3_endpoint`` instead of every one in the files. Raises CommandError.
    """
    tasks = manifests.tasks
    spec = tasks[0].spec if len(tasks) == 1 else None
    settings = (
        spec.dataset.model_dump(by_alias=True, mode="json", exclude_none=True) if spec is not None else {}
    )
    for source in ("uri", "uris", "inline", "configMapRef"):
        settings.pop(source, None)
    training = (spec.training if spec is not None else TrainingSpec()).model_dump(
        by_alias=True, mode="json", exclude_none=True
    )
    training |= {
        name: options[name] for name in ("maxSeqLength", "overlong") if options.get(name) is not None
    }
    settings |= {
        name: options[name] for name in ("format", "fileFormat", "trainOn") if options.get(name) is not None
    }
    if options.get("chatTemplate") is not None:
        settings.pop("chatTemplateRef", None)
        settings["chatTemplate"] = options["chatTemplate"]
    if "chatTemplateRef" in settings:
        raise CommandError(
            "the task's chat template is in a ConfigMap, which this command cannot read: pass it with "
            "--chat-template FILE",
            exit_codes.INVALID,
        )
    for one in fields:
        name, equals, column = one.partition("=")
        if not equals:
            raise CommandError(
                f"--field {one}: write NAME=COLUMN, such as prompt=question", exit_codes.INVALID
            )
        settings.setdefault("fields", {})[name] = column
    try:
        uri = data if "://" in data else _address_of(as_file(data))
    except OSError as error:
        raise CommandError(f"--data {data}: {error.strerror}", exit_codes.INVALID) from error
    base = _base_of(manifests, model)
    caches = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache")

    def access(storage: Storage, namespace: str) -> StorageAccess:
        reference = storage.secret_ref
        keys = _secret(manifests, namespace, reference.name) if reference is not None else None
        return access_to(storage, keys, environment, s3_endpoint)

    try:
        return LookQuestion(
            model=ModelSource(name=model, uri=base.uri, revision=base.revision),
            model_storage=access(base.storage, base.namespace),
            storage=access(spec.storage, tasks[0].place.namespace)
            if spec is not None
            else access(Storage(), ""),
            hub_endpoint=base.hub_endpoint,
            cache_dir=str(caches / "mlora-operator"),
            dataset=DatasetSpec.model_validate({**settings, "uri": uri}).for_plan(),
            training=TrainingSpec.model_validate(training),
            show=show,
        )
    except ValidationError as error:
        raise CommandError(describe(error, "dataset"), exit_codes.INVALID) from error


def _address_of(path: Path) -> str:
    """Of a file, or of all that a path with ``*`` in it stands for."""
    uri = path.absolute().as_uri()
    return uri if path.exists() else uri.replace("%2A", "*")


def looked_at(question: LookQuestion) -> LookAnswer:
    """Asks a worker process. Raises CommandError."""
    if importlib.util.find_spec("transformers") is None:
        raise CommandError(
            "reading rows needs the worker: run pip install 'mlora-operator[worker]'", exit_codes.INVALID
        )
    try:
        return look(question, dict(os.environ))
    except SurveyFailed as error:
        raise CommandError(f"the rows cannot be read: {error}", exit_codes.FAILED) from error


def exit_code(answer: LookAnswer | None) -> int:
    failure = answer.failure if answer is not None else None
    if failure is None:
        return exit_codes.OK
    away = failure.reason in (FailureReason.STORAGE_UNREACHABLE, FailureReason.ACCESS_DENIED)
    return exit_codes.UNREACHABLE if away else exit_codes.INVALID


def print_answer(answer: LookAnswer) -> None:
    """Counts, lengths, and the first rows with what is learnt in green; control characters are written out."""
    out = stdout()
    counts = answer.counts
    assert counts is not None
    out.print(
        f"[bold]{counts.used:,}[/] of {counts.rows:,} rows are used: {counts.tokens:,} tokens, "
        f"{counts.supervised_tokens:,} of them supervised; the longest row has {answer.longest:,}"
    )
    if counts.format is not None:
        out.print(f"  format: {counts.format.value}")
    if answer.desirable is not None:
        out.print(f"  desirable: {answer.desirable:,}, undesirable: {counts.used - answer.desirable:,}")
    for rule, count in counts.dropped.items():
        lines = counts.first_dropped.get(rule, ())
        files = (counts.first_dropped_in or {}).get(rule, ())
        if len(files) == len(lines):
            places = [f"{line} of {file}" for line, file in zip(lines, files, strict=True)]
        else:
            places = list(map(str, lines))
        out.print(f"  dropped as {rule}: {count:,} (first in {', '.join(places)})", markup=False)
    if counts.truncated:
        out.print(f"  cut to maxSeqLength: {counts.truncated:,}")
    if counts.special_tokens:
        out.print(f"  with special tokens in their own text: {counts.special_tokens:,}")
    most = max((bar.rows for bar in answer.histogram), default=1)
    wide = max((len(f"{bar.high:,}") for bar in answer.histogram), default=1)
    for bar in answer.histogram:
        drawn = "█" * max(int(bar.rows > 0), round(_BAR * bar.rows / most))
        out.print(f"  {bar.low:>{wide},} to {bar.high - 1:>{wide},} tokens  {drawn} {bar.rows:,}")
    for number, row in enumerate(answer.shown, start=1):
        out.print(f"[bold]row {number}[/], supervised text in [green]green[/]:")
        shown = Text()
        side = None
        for part in row:
            if part.answer != side:
                shown.append("\n" if side is not None else "")
                shown.append(f"{part.answer}: ", style="bold")
                side = part.answer
            # Without colours, as in a file or a pipe, brackets show it.
            text = _printable(part.text)
            shown.append(f"⟦{text}⟧" if part.learnt else text, style="green" if part.learnt else "dim")
        out.print(shown)


def _printable(text: str) -> str:
    """A row may hold what a terminal would obey."""
    return "".join(
        letter if letter == "\n" or letter.isprintable() else f"\\u{ord(letter):04x}" for letter in text
    )


@dataclass(frozen=True, slots=True)
class _Base:
    uri: str
    revision: str | None = None
    hub_endpoint: str = HUB_ENDPOINT
    storage: Storage = field(default_factory=Storage)
    namespace: str = ""


def _secret(manifests: Manifests, namespace: str, name: str) -> Mapping[str, str] | None:
    for secret in manifests.secrets:
        if (secret.place.namespace, secret.place.name) == (namespace, name):
            return secret.data
    return None


def _base_of(manifests: Manifests, model: str) -> _Base:
    """A LoRAPipeline's that serves the name, or a folder, or an address."""
    for pipeline in manifests.pipelines:
        spec = pipeline.spec
        if spec.model.name == model:
            hub = spec.worker.hub_endpoint or HUB_ENDPOINT
            return _Base(spec.model.uri, spec.model.revision, hub, spec.storage, pipeline.place.namespace)
    if "://" in model:
        return _Base(model)
    if Path(model).is_dir():
        return _Base(Path(model).absolute().as_uri())
    raise CommandError(
        f"--model {model}: no LoRAPipeline in the files serves it, and it is not a folder: give the model's folder "
        f"or address, or add the LoRAPipeline's file",
        exit_codes.INVALID,
    )
