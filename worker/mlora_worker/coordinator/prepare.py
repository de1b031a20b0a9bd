"""Everything a task needs before it may train: output probed, rows tokenised, targets resolved. Off the critical path.

All that can be wrong with a task's input is found here, before it takes a place in the pipeline.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlora_worker.coordinator.fingerprint import fingerprint_of
from mlora_worker.coordinator.reading import Reading
from mlora_worker.coordinator.room import check_room
from mlora_worker.coordinator.tasks import PreparedTask
from mlora_worker.data.order import StepPlan
from mlora_worker.data.prepare import prepare
from mlora_worker.model.architecture import Architecture
from mlora_worker.model.facts import resolve_targets
from mlora_worker.protocol import AdapterInfo, ModelFacts, ModelSource, TaskPlan
from mlora_worker.storage.adapter import (
    FinishedAdapter,
    adapter_config,
    find_published,
    fingerprint,
    named_base,
    published_info,
)
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
    task: TaskPlan, base: BaseModel, store: Store, *, checkpoints: str, kept: KeptWork, reading: Reading
) -> PreparedTask | AdapterInfo | FinishedAdapter:
    """Rows and targets of ``task``; or the adapter, when an earlier run of this very task has published it already, or has
    finished it and could not publish it.

    ``checkpoints``: address of its checkpoints' folder. Raises errors that carry a ``reason`` (``FailureReason``) and a
    message for the user.
    """
    published = find_published(store, task.output_uri)
    if published is not None and published.fingerprint == fingerprint(task):
        return published_info(task.output_uri, published)
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
    prepared = prepare(
        task.dataset,
        task.training,
        base.tokenizer,
        reading.source(store, task.storage),
        base.facts.max_positions,
        text=task.dataset_text,
        cache=reading.cache(task.namespace),
    )
    steps = StepPlan(len(prepared.rows), task.training)
    return PreparedTask(
        rows=prepared.rows,
        counts=prepared.counts,
        steps=steps,
        targets=targets,
        fingerprint=fingerprint_of(
            task.lora, task.training, targets, prepared.rows, steps.total_steps, base.source, base.facts
        ),
        load=load_of(prepared.rows.lengths.tolist(), rows_per_step(task.training)),
    )
