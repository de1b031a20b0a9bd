"""Whom a log line is about, in fields by which a log store can be searched. Pure."""

from __future__ import annotations

from mlora_operator.reconcile.state.snapshot import Key, Pipeline, Task

Fields = dict[str, str | int]


def about_task(task: Task, pipeline: str | None = None) -> Fields:
    """``pipeline``: namespace/name of the one that serves it; by default as its status says."""
    serving = pipeline or task.status.pipeline
    fields: Fields = {"task": task.key.name, "namespace": task.key.namespace, "generation": task.generation}
    return fields | ({"pipeline": serving} if serving else {})


def about_pipeline(pipeline: Pipeline) -> Fields:
    return {**about_key(pipeline.key), "generation": pipeline.generation}


def about_key(pipeline: Key) -> Fields:
    """Of a pipeline of which no more than the key is at hand."""
    return {"pipeline": str(pipeline), "namespace": pipeline.namespace}
