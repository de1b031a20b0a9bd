"""Forecasts for people and for programs. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mlora_operator.api.units import show_bytes
from mlora_operator.local.forecast import PipelineForecast, StageForecast, TaskForecast
from mlora_operator.reconcile.state.cause import Cause
from mlora_operator.reconcile.state.snapshot import Task


def lines(forecasts: Sequence[PipelineForecast]) -> Iterator[str]:
    for index, one in enumerate(forecasts):
        if index:
            yield ""
        yield from _pipeline(one)


def as_json(
    forecasts: Sequence[PipelineForecast],
    unserved: Sequence[tuple[Task, Cause]],
    notes: Sequence[str],
) -> dict[str, Any]:
    return {
        "pipelines": [_json(one) for one in forecasts],
        "unserved": [
            {
                "namespace": task.key.namespace,
                "name": task.key.name,
                "reason": cause.reason,
                "message": cause.message,
            }
            for task, cause in unserved
        ],
        "notes": list(notes),
    }


def _pipeline(one: PipelineForecast) -> Iterator[str]:
    model, count = one.spec.model, one.spec.stages
    kept = model.dtype if model.quantization.type == "none" else f"{model.dtype}, {model.quantization.label}"
    yield (
        f"{one.name}: {model.name}, {kept}, {count} stage{'s' * (count > 1)}, {one.device}, "
        f"microbatches of at most {one.spec.microbatch_tokens} tokens"
    )
    yield ""
    yield from table(
        ("STAGE", "LAYERS", "PARAMETERS", "WEIGHTS", "COST", "MEMORY", "OF"),
        [
            (
                str(stage.shape.stage),
                _layers(stage),
                f"{stage.shape.parameters / 1e6:,.1f} M",
                show_bytes(stage.weights),
                f"{stage.share:.1%}",
                show_bytes(stage.memory.needed),
                "unknown" if one.memory.bytes is None else show_bytes(stage.memory.budget),
            )
            for stage in one.stages
        ],
        left=("LAYERS",),
    )
    yield ""
    yield from table(
        ("TASK", "PRIORITY", "STATE", "REASON", "TOKENS/STEP", "LONGEST ROW", "STEPS", "ADAPTER"),
        [
            (
                task.task.key.name,
                str(_priority(task)),
                task.state,
                task.cause.reason if task.cause.reason != task.state else "",
                str(task.load.tokens),
                str(task.longest),
                str(task.total_steps) if task.total_steps is not None else "?",
                show_bytes(task.adapter_bytes),
            )
            for task in one.tasks
        ],
        left=("TASK", "STATE", "REASON"),
    )
    for task in one.tasks:
        if not task.admitted:
            yield f"  {task.task.key.name}: {task.cause.message}"
    if one.plan.groups:
        yield ""
        yield from _stream(one)
    yield ""
    yield "assumed:"
    yield from (f"  - {line}" for line in one.assumed)


def _stream(one: PipelineForecast) -> Iterator[str]:
    names = {task.task.uid: task.task.key.name for task in one.tasks}
    yield from table(
        ("GROUP", "TASKS", "TOKENS/STEP", "MICROBATCHES", "WIDEST"),
        [
            (
                str(number),
                ", ".join(names[uid] for uid in group.tasks),
                str(group.tokens),
                str(group.microbatches),
                str(group.widest),
            )
            for number, group in enumerate(one.plan.groups)
        ],
        left=("TASKS",),
    )
    yield ""
    plan = one.plan
    yield f"bubble      {plan.bubble:.1%} of the time the busiest stage waits for others"
    yield f"idle        {plan.idle:.1%} of all stages' time, including stages with less work"
    figures = f"{one.speedup:.2f} times one device"
    if one.tokens_per_second is not None:
        figures += f", {one.tokens_per_second:,.0f} tokens/s"
        duration = _seconds(one)
        if duration is not None:
            figures += f": all admitted tasks in about {_duration(duration)}"
    yield f"throughput  {figures}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[str]) -> Iterator[str]:
    """Aligned columns; those not in ``left`` are numbers and stand at the right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    for row in (header, *rows):
        cells = [
            cell.ljust(width) if name in left else cell.rjust(width)
            for cell, width, name in zip(row, widths, header, strict=True)
        ]
        yield "  ".join(cells).rstrip()


def _layers(stage: StageForecast) -> str:
    shape = stage.shape
    own = f"{shape.first_layer}-{shape.last_layer}"
    if shape.first_layer == shape.last_layer:
        own = str(shape.first_layer)
    return ("embedding, " if stage.embedding else "") + own + (", norm, head" if stage.head else "")


def _priority(task: TaskForecast) -> int:
    assert task.task.spec is not None
    return task.task.spec.priority


def _seconds(one: PipelineForecast) -> float | None:
    """Until the last admitted task is done, were the throughput the same to the end."""
    tokens = 0
    for task in one.tasks:
        if task.admitted:
            if task.total_steps is None:
                return None
            tokens += task.total_steps * task.load.tokens
    return tokens / one.tokens_per_second if one.tokens_per_second else None


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _json(one: PipelineForecast) -> dict[str, Any]:
    names = {task.task.uid: task.task.key.name for task in one.tasks}
    plan = one.plan
    return {
        "name": one.name,
        "model": one.spec.model.name,
        "dtype": one.spec.model.dtype,
        "quantization": one.spec.model.quantization.type,
        "device": one.device,
        "microbatchTokens": one.spec.microbatch_tokens,
        "memorySource": one.memory.source,
        "stages": [
            {
                "stage": stage.shape.stage,
                "firstLayer": stage.shape.first_layer,
                "lastLayer": stage.shape.last_layer,
                "embedding": stage.embedding,
                "head": stage.head,
                "parameters": stage.shape.parameters,
                "weightBytes": stage.weights,
                "products": stage.shape.products,
                "costShare": stage.share,
                "neededBytes": stage.memory.needed,
                "allowedBytes": None if one.memory.bytes is None else stage.memory.budget,
                "tokensHeld": held,
            }
            for stage, held in zip(one.stages, plan.held, strict=True)
        ],
        "tasks": [
            {
                "namespace": task.task.key.namespace,
                "name": task.task.key.name,
                "priority": _priority(task),
                "state": task.state,
                "reason": task.cause.reason,
                "message": task.cause.message,
                "tokensPerStep": task.load.tokens,
                "rowsPerStep": task.load.rows,
                "longestRow": task.longest,
                "rowSpread": task.load.spread,
                "rowsRead": task.rows.counts.rows if task.rows is not None else 0,
                "totalSteps": task.total_steps,
                "adapterBytes": task.adapter_bytes,
            }
            for task in one.tasks
        ],
        "groups": [
            {
                "tasks": [names[uid] for uid in group.tasks],
                "tokensPerStep": group.tokens,
                "microbatches": group.microbatches,
                "widest": group.widest,
            }
            for group in plan.groups
        ],
        "bubble": plan.bubble,
        "idle": plan.idle,
        "speedup": one.speedup,
        "tokensPerSecond": one.tokens_per_second,
        "seconds": _seconds(one),
        "assumed": list(one.assumed),
    }
