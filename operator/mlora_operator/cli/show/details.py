"""All that a reader wants to know of one task, as lines with a title. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from mlora_operator.cli.ages import age
from mlora_operator.cli.condition_words import tells_something, words
from mlora_operator.cli.task_table import row

JSON = Mapping[str, Any]
Line = tuple[str, str]  # title, which is empty where the line belongs to the one above, and text


def details(task: JSON, now: datetime, program: str = "mlora") -> list[Line]:
    """``program``: how the user calls this command, for those that are named."""
    return [
        *_head(task, now),
        *_spec(task["spec"]),
        *_data(task),
        *_conditions(task, now),
        *_adapter(task, program),
    ]


def _head(task: JSON, now: datetime) -> Iterator[Line]:
    shown, status, meta = row(task), task.get("status") or {}, task["metadata"]
    yield "name", f"{shown.name} in namespace {shown.namespace}"
    yield "state", shown.state + (f" ({shown.reason})" if shown.reason not in ("", shown.state) else "")
    if shown.failed and shown.message:
        yield "", shown.message
    if shown.total_steps:
        parts = [f"step {shown.step} of {shown.total_steps}"]
        parts += [f"loss {shown.loss}"] if shown.loss else []
        parts += [f"evaluation loss {status['evaluationLoss']}"] if status.get("evaluationLoss") else []
        parts += [f"reward margin {status['rewardMargin']}"] if status.get("rewardMargin") else []
        parts += [f"{shown.tokens_per_second} tokens/s"] if shown.tokens_per_second else []
        parts += [f"about {shown.eta} to the last step"] if shown.eta else []
        yield "progress", ", ".join(parts)
    again = [
        f"{status[field]} {word}{'s' * (status[field] != 1)}"
        for field, word in (("preemptions", "preemption"), ("restarts", "restart"))
        if status.get(field)
    ]
    again += [f"retried {status['retries']} times"] if status.get("retries") else []
    if again:
        yield "", ", ".join(again)
    yield "created", f"{meta.get('creationTimestamp', '')} ({age(meta.get('creationTimestamp'), now)} ago)"
    if status.get("pipeline"):
        yield "pipeline", status["pipeline"]


_LORA = (
    "type",
    "rank",
    "alpha",
    "dropout",
    "useRslora",
    "useDora",
    "loraplusLrRatio",
    "targetModules",
    "targetParameters",
)


def _spec(spec: JSON) -> Iterator[Line]:
    lora, training = spec.get("lora") or {}, spec.get("training") or {}
    yield "base model", spec.get("baseModel", "")
    yield "priority", str(spec.get("priority", 0))
    yield "lora", _fields(lora, *_LORA)
    steps = "maxSteps" if training.get("maxSteps") else "epochs"
    kinds = {name: (training.get(name) or {}).get("type") for name in ("objective", "optimizer")}
    numbers = (steps, "batchSize", "learningRate", "schedule", "maxSeqLength")
    shown = _fields(training | kinds, *kinds, *numbers)
    if shown:
        yield "training", shown


def _data(task: JSON) -> Iterator[Line]:
    dataset, counts = task["spec"].get("dataset") or {}, (task.get("status") or {}).get("data")
    where = dataset.get("uri") or ", ".join(dataset.get("uris") or ())
    if not where:
        reference = dataset.get("configMapRef") or {}
        where = f"configmap/{reference['name']}, {reference['key']}" if reference else "in the task itself"
    kind, found = dataset.get("format"), (counts or {}).get("format")
    kind = kind or (f"{found}, detected" if found else None)
    yield "data", where + (f" ({kind})" if kind else "")
    if counts is None:
        return
    yield (
        "",
        f"{counts.get('used', 0):,} of {counts.get('rows', 0):,} rows are used, {counts.get('tokens', 0):,} tokens",
    )
    for rule, count in (counts.get("dropped") or {}).items():
        lines = (counts.get("firstDropped") or {}).get(rule) or ()
        files = (counts.get("firstDroppedIn") or {}).get(rule) or ()
        places = (
            [f"{line} of {file}" for line, file in zip(lines, files, strict=True)]
            if len(files) == len(lines)
            else list(map(str, lines))
        )
        yield (
            "",
            f"dropped as {rule}: {count:,}" + (f" (first in line {', '.join(places)})" if places else ""),
        )
    for field, text in (
        ("truncated", "cut to maxSeqLength"),
        ("heldOut", "held out for evaluation"),
        ("beyondLimit", "left out by dataset.limit"),
    ):
        if counts.get(field):
            yield "", f"{text}: {counts[field]:,}"


def _conditions(task: JSON, now: datetime) -> Iterator[Line]:
    held = (task.get("status") or {}).get("conditions") or []
    if not held:
        yield "conditions", "none: no operator has processed the task yet"
    title = "conditions"
    for one in sorted(held, key=lambda one: str(one.get("lastTransitionTime", ""))):
        if not tells_something(one):
            continue
        since = age(one.get("lastTransitionTime"), now)
        yield title, words(one) + (f", for {since}" if since and not one.get("message") else "")
        title = ""


def _adapter(task: JSON, program: str) -> Iterator[Line]:
    shown, meta = row(task), task["metadata"]
    found = (task.get("status") or {}).get("adapter") or {}
    if shown.succeeded:
        size = f", {found['bytes']:,} bytes" if found.get("bytes") else ""
        yield "adapter", (shown.adapter or task["spec"]["output"]["uri"]) + size
        yield "fetch it", f"{program} fetch {meta['name']} -n {meta['namespace']}"
    else:
        yield "adapter", f"none yet; it will be at {(task['spec'].get('output') or {}).get('uri', '')}"


def _fields(part: JSON, *names: str) -> str:
    """A switch that is on is its name; what is off, empty or absent is left out."""
    shown = []
    for name in names:
        value = part.get(name)
        if value is True:
            shown.append(name)
        elif value is not None and value is not False and value != []:
            shown.append(f"{name} {', '.join(map(str, value)) if isinstance(value, list) else value}")
    return ", ".join(shown)
