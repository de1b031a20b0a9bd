"""Everything a task needs before it may train: output probed, rows tokenised, targets resolved. Off the critical path.

All that can be wrong with a task's input is found here, before it takes a place in the pipeline.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from typing import Any

import numpy as np

from mlora_worker.coordinator.evaluation import EvaluationRows
from mlora_worker.coordinator.fingerprint import fingerprint_of
from mlora_worker.coordinator.initial import read_initial
from mlora_worker.coordinator.reading import Reading
from mlora_worker.coordinator.room import check_room
from mlora_worker.coordinator.tasks import PreparedTask
from mlora_worker.data.errors import DataError
from mlora_worker.data.order import StepPlan
from mlora_worker.data.prepare import Prepared, prepare
from mlora_worker.data.rendering import tells_the_date
from mlora_worker.model.architecture import Architecture
from mlora_worker.model.facts import resolve_targets
from mlora_worker.protocol import (
    AdapterInfo,
    Dataset,
    DatasetFormat,
    FailureReason,
    ModelFacts,
    ModelSource,
    TaskPlan,
)
from mlora_worker.storage.adapter import (
    FinishedAdapter,
    adapter_config,
    find_published,
    fingerprint,
    named_base,
    published_info,
)
from mlora_worker.storage.checkpoint import DAY
from mlora_worker.storage.kept import KeptWork
from mlora_worker.storage.probe import probe_output
from mlora_worker.storage.store import Store
from mlora_worker.stream.planner import load_of, rows_per_step
from mlora_worker.stream.targets import published_names


@dataclass(frozen=True, slots=True)
class BaseModel:
    """What is known of the frozen model on rank 0."""

    source: ModelSource
    architecture: Architecture
    facts: ModelFacts
    tokenizer: Any  # transformers.PreTrainedTokenizerFast


def prepare_task(
    task: TaskPlan,
    base: BaseModel,
    store: Store,
    *,
    checkpoints: str,
    kept: KeptWork,
    reading: Reading,
    day: Callable[[], date] = date.today,
) -> PreparedTask | AdapterInfo | FinishedAdapter:
    """Rows and targets of ``task``; or the adapter, when an earlier run of this very task has published it already, or has
    finished it and could not publish it.

    ``checkpoints``: address of its checkpoints' folder. ``day``: what a chat template that writes the date is told; asked
    only where rows go through such a template.

    Raises errors that carry a ``reason`` (``FailureReason``) and a message for the user.
    """
    published = find_published(store, task.output_uri)
    if published is not None and published.fingerprint == fingerprint(task):
        return published_info(task.output_uri, published)
    reference = task.dataset.chat_template_ref
    if reference is not None and task.chat_template is None:
        raise DataError(
            FailureReason.INVALID_SPEC,
            f"dataset.chatTemplateRef: the text of ConfigMap {reference.name}, key {reference.key}, is not known any more; "
            "create the ConfigMap again",
        )
    adapted = resolve_targets(base.facts, task.lora)
    targets = published_names(base.facts, adapted)
    finished = kept.adapter(task.uid, fingerprint(task))
    config = adapter_config(
        task.lora,
        *named_base(task, base.source),
        targets,
        fan_in_fan_out=base.architecture.transposed,
    )
    if finished is not None and finished.config == config:
        return finished
    check_room(task, adapted, checkpoints=checkpoints, scratch=kept.scratch_folder_for)
    probe_output(store, task.output_uri)
    initial = None
    if task.init_from is not None:
        initial = read_initial(store, task.init_from.uri, task.lora, adapted)

    templated = task.dataset.format is not DatasetFormat.TEXT
    today = day() if templated and tells_the_date(base.tokenizer, task.chat_template) else None

    def rows_of(dataset: Dataset) -> Prepared:
        return prepare(
            dataset,
            task.training,
            base.tokenizer,
            reading.source(store, task.storage),
            base.facts.max_positions,
            text=task.dataset_text,
            template=task.chat_template,
            day=today,
            cache=reading.cache(task.namespace),
        )

    prepared = rows_of(task.dataset)
    evaluation = _evaluation_rows(task, prepared, rows_of)
    steps = StepPlan(len(prepared.rows), task.training)
    facts = fingerprint_of(
        task.lora, task.training, targets, prepared.rows, steps.total_steps, base.source, base.facts
    )
    if task.chat_template is not None:
        facts["dataset.chatTemplate"] = hashlib.sha256(task.chat_template.encode()).hexdigest()
    if today is not None:
        facts[DAY] = today.isoformat()
    if evaluation is not None:
        facts |= evaluation.facts()
    if initial is not None:
        facts["lora.initFrom"] = initial.sha256
    return PreparedTask(
        rows=prepared.rows,
        counts=prepared.counts,
        steps=steps,
        targets=targets,
        fingerprint=facts,
        evaluation=evaluation,
        initial=initial.state if initial is not None else None,
        load=load_of(prepared.rows.lengths.tolist(), rows_per_step(task.training)),
    )


def _evaluation_rows(
    task: TaskPlan, prepared: Prepared, rows_of: Callable[[Dataset], Prepared]
) -> EvaluationRows | None:
    """Raises what ``prepare`` raises, and DataError where there are no rows to evaluate on."""
    spec = task.evaluation
    if spec is None:
        return None
    rows = prepared.held_out
    if spec.uri is not None:
        elsewhere = {"uri": spec.uri, "uris": None, "inline": None, "config_map_ref": None}
        whole = {"limit": spec.limit, "held_out": None, "shuffle_seed": None, "split": None}
        rows = rows_of(task.dataset.model_copy(update=elsewhere | whole)).rows
    if not len(rows):
        raise DataError(
            FailureReason.INVALID_SPEC,
            "evaluation has no rows: name evaluation.uri, or a part of the rows to keep from training in dataset.heldOut",
        )
    if spec.limit is not None and len(rows) > spec.limit:
        rows = rows.chosen(np.arange(spec.limit))
    return EvaluationRows(spec, rows)
