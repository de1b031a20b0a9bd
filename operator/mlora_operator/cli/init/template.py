"""The text of a LoRATask, with comments that say what may be changed. Pure."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import shorten

from mlora_operator.api import API_VERSION
from mlora_worker.lines import one_line
from mlora_worker.protocol import DatasetFormat, NamedFormat

_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./@%+-]*(?:://?[A-Za-z0-9_./@%+:-]+)?")
_OTHER_TYPES = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}


@dataclass(frozen=True, slots=True)
class TaskDraft:
    """``model_place``: folder or address of the base model, where it is known. ``columns``: of the rows, if they were
    read.
    """

    file: str
    name: str
    base_model: str
    model_place: str | None
    data: str
    data_uri: str
    output_uri: str
    rows: NamedFormat
    columns: Sequence[str]


def text_of(draft: TaskDraft) -> str:
    model = shlex.quote(f"{draft.base_model}={draft.model_place or 'FOLDER_OR_ADDRESS'}")
    place = shlex.quote(draft.model_place) if draft.model_place else "FOLDER_OR_ADDRESS"
    file = "TASK.yaml" if draft.file == "-" else shlex.quote(draft.file)
    fields = ", ".join(f"{name}: {scalar(column, flow=True)}" for name, column in draft.rows.fields.items())
    lines = [
        f"# An adapter of {draft.base_model}, trained on {draft.data}.",
        f"# See what it would learn:  mlora validate {file} --data {shlex.quote(draft.data)} --model {place}",
        f"# Train it here:            mlora run {file} --model {model}",
        f"# Train it in a cluster:    mlora submit -f {file} --wait",
        f"apiVersion: {API_VERSION}",
        "kind: LoRATask",
        "metadata:",
        f"  name: {scalar(draft.name)}",
        "spec:",
        f"  baseModel: {scalar(draft.base_model)}  # as the LoRAPipeline that serves it calls it",
        "  lora:",
        "    rank: 16  # size of the adapter; 8 to 64 is usual",
        "    alpha: 32  # its weight is alpha / rank",
        "    targetModules: [all-linear]  # layers that get an adapter; all-linear: all but the head",
        "  dataset:",
        f"    # {_told_of_columns(draft)}",
        f"    uri: {scalar(draft.data_uri)}",
        f"    format: {draft.rows.format.value}  # promptCompletion, messages, sharegpt, alpaca, text, "
        "preference or unpairedPreference",
        *([f"    fields: {{{fields}}}  # our name: name of the column"] if fields else []),
        "    # heldOut: 0.05  # fraction of the rows to evaluate on instead of training on them",
        "  training:",
        *_objective(draft.rows.format),
        "    epochs: 1  # passes over the rows; or maxSteps",
        "    batchSize: 8  # rows of a step",
        f"    learningRate: {_RATES.get(draft.rows.format, '0.0002')}",
        "    # maxSeqLength: 1024  # tokens; status.data counts the rows that are cut",
        "  # evaluation: {everySteps: 50}  # with heldOut",
        "  output:",
        f"    uri: {scalar(draft.output_uri)}  # folder of the adapter",
        *_storage(draft),
    ]
    # What comes from outside makes no line of its own.
    return "\n".join(map(one_line, lines)) + "\n"


# Where it is not the usual one: to prefer one answer takes small steps.
_RATES = {DatasetFormat.PREFERENCE: "0.000005", DatasetFormat.UNPAIRED_PREFERENCE: "0.000005"}
_OBJECTIVES = {
    DatasetFormat.PREFERENCE: "    objective: {type: dpo, beta: 0.1}  # or cpo, simpo, orpo",
    DatasetFormat.UNPAIRED_PREFERENCE: "    objective: {type: kto, beta: 0.1}  # and desirableWeight, undesirableWeight",
}


def _objective(format: DatasetFormat) -> list[str]:
    return [_OBJECTIVES[format]] if format in _OBJECTIVES else []


def scalar(text: str, *, flow: bool = False) -> str:
    """``text`` in YAML, in double quotes where it could be read as something else. ``flow``: between braces."""
    plain = _PLAIN.fullmatch(text) is not None and text.lower() not in _OTHER_TYPES
    return text if plain and not (flow and ":" in text) else json.dumps(text)


def _told_of_columns(draft: TaskDraft) -> str:
    if not draft.columns:
        return "These rows were not read: check format and fields."
    return f"Its rows have the columns {shorten(', '.join(draft.columns), 100, placeholder=' ...')}."


def _storage(draft: TaskDraft) -> list[str]:
    """Of s3:// addresses. Where all is on this machine, it is what a cluster needs later."""
    s3 = "s3://" in draft.data_uri + draft.output_uri
    files = "file://" in draft.data_uri + draft.output_uri
    return [
        *(
            ["  # A cluster reads no file:// addresses: upload the rows, and give s3:// addresses."]
            if files
            else []
        ),
        *(["  # The store of the s3:// addresses; without endpoint it is AWS."] if s3 or files else []),
        *(
            [
                "  # storage:",
                "  #   endpoint: https://s3.example.com",
                "  #   secretRef: {name: s3-credentials}  # with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
            ]
            if s3 or files
            else []
        ),
    ]
