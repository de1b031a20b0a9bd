"""Everything a task needs before it may train: output probed, rows tokenised, targets resolved. Off the critical path.

All that can be wrong with a task's input is found here, before it takes a place in the pipeline.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date

from mlora_worker.coordinator.preparation.disk_check import check_disk_space
from mlora_worker.coordinator.preparation.fingerprint import fingerprint_of
from mlora_worker.coordinator.preparation.initial import read_initial
from mlora_worker.coordinator.task.evaluation import EvaluationRows
from mlora_worker.coordinator.task.prepared import PreparedTask
from mlora_worker.data.errors import DataError
from mlora_worker.data.training_rows.learning_rate import warmup_steps
from mlora_worker.data.training_rows.step_order import StepPlan
from mlora_worker.model.architecture import Architecture
from mlora_worker.model.facts import resolve_targets
from mlora_worker.preparing.maker import RowMaker
from mlora_worker.protocol import (
    AdapterInfo,
    DatasetFormat,
    FailureReason,
    ModelFacts,
    ModelSource,
    TaskPlan,
)
from mlora_worker.storage.artifacts.adapter import (
    FinishedAdapter,
    adapter_config,
    find_published,
    fingerprint,
    named_base,
    published_info,
    same_config,
)
from mlora_worker.storage.artifacts.existing_output import check_free
from mlora_worker.storage.artifacts.local_spool import LocalSpool
from mlora_worker.storage.artifacts.task_state import DAY, DETECTED_FORMAT
from mlora_worker.storage.artifacts.write_probe import probe_output
from mlora_worker.storage.object_store.store import Store
from mlora_worker.stream.targets import published_names


@dataclass(frozen=True, slots=True)
class BaseModel:
    """What is known of the frozen model on rank 0."""

    source: ModelSource
    architecture: Architecture
    facts: ModelFacts

    @property
    def quantization(self) -> str | None:
        """Of its matrices, in words; None: they are plain."""
        asked = self.source.quantization
        return self.architecture.stored_form if asked is None else asked.label


def prepare_task(
    task: TaskPlan,
    base: BaseModel,
    store: Store,
    *,
    checkpoints: str,
    spool: LocalSpool,
    rows: RowMaker,
    wanted: Callable[[], bool] = lambda: True,
    day: Callable[[], date] = date.today,
    format: Callable[[], DatasetFormat | None] = lambda: None,
) -> PreparedTask | AdapterInfo | FinishedAdapter:
    """Rows and targets of ``task``; or the adapter, when an earlier run of this very task has published it already, or has
    finished it and could not publish it.

    ``checkpoints``: address of its checkpoints' folder. ``rows`` makes its rows, if they are ``wanted`` then. ``day``: what
    a chat template that writes the date is told; asked only where rows go through such a template. ``format``: what was
    detected when the task began, asked only where its spec names none.

    Raises errors that carry a ``reason`` (``FailureReason``) and a message for the user, and Cancelled.
    """
    published = find_published(store, task.output_uri)
    if published is not None and published.fingerprint == fingerprint(task):
        return published_info(task.output_uri, published)
    reference = task.dataset.chat_template_ref
    if reference is not None and task.chat_template is None:
        raise DataError(
            FailureReason.INVALID_SPEC,
            f"dataset.chatTemplateRef: the text of ConfigMap {reference.name}, key {reference.key}, is no longer "
            f"available: create the ConfigMap again",
        )
    adapted = resolve_targets(base.facts, task.lora)
    targets = published_names(base.facts, adapted, is_part=base.architecture.is_part)
    finished = spool.adapter(task.uid, fingerprint(task))
    config = adapter_config(
        task.lora,
        *named_base(task, base.source),
        targets,
        fan_in_fan_out=base.architecture.transposed,
        seed=task.training.seed,
    )
    if finished is not None and same_config(finished.config, config):
        return finished
    check_free(store, task.output_uri, task)
    check_disk_space(task, adapted, checkpoints=checkpoints, scratch=spool.scratch_folder_for)
    probe_output(store, task.output_uri)
    initial = None
    if task.init_from is not None:
        initial = read_initial(store, task.init_from.uri, task.lora, adapted)

    detects = task.dataset.detect_format
    kept = format() if detects else None
    asked = task.model_copy(update={"dataset": task.dataset.with_format(kept)}) if kept is not None else task
    templated = asked.dataset.detect_format or asked.dataset.format is not DatasetFormat.TEXT
    today = day() if templated and rows.uses_date(task.chat_template) else None
    made = rows.make(asked, today, wanted)
    evaluation = None
    if task.evaluation is not None and made.evaluation is not None:
        evaluation = EvaluationRows(
            task.evaluation, made.evaluation, task.training.preference, task.training.max_seq_length
        )
    steps = StepPlan(len(made.train), task.training)
    _check_warmup(task, steps.total_steps)
    facts = fingerprint_of(
        task.lora, task.training, targets, made.train, steps.total_steps, base.source, base.facts
    )
    if task.chat_template is not None:
        facts["dataset.chatTemplate"] = hashlib.sha256(task.chat_template.encode()).hexdigest()
    if today is not None and made.counts.format is not DatasetFormat.TEXT:
        facts[DAY] = today.isoformat()
    if detects and made.counts.format is not None:
        facts[DETECTED_FORMAT] = made.counts.format.value
    if evaluation is not None:
        facts |= evaluation.facts()
    if initial is not None:
        facts["lora.initFrom"] = initial.sha256
    return PreparedTask(
        rows=made.train,
        counts=made.counts,
        steps=steps,
        targets=targets,
        fingerprint=facts,
        evaluation=evaluation,
        initial=initial.state if initial is not None else None,
        reference_sha256=initial.sha256 if initial is not None else None,
        load=made.load,
    )


def _check_warmup(task: TaskPlan, steps: int) -> None:
    """The first step of a warm-up has a rate of zero, and one that is longer than the training never reaches the peak. One
    that has trained before is left alone. Raises DataError."""
    warmup = warmup_steps(steps, task.training)
    if task.started or warmup == 0 or (warmup <= steps and steps > 1):
        return
    ratio = task.training.warmup_ratio
    asked = f"training.warmupSteps is {warmup}" if ratio is None else f"training.warmupRatio is {ratio:g}"
    lower = f"Lower warmupSteps to {steps // 10}" if ratio is None else "Remove warmupRatio"
    raise DataError(
        FailureReason.INVALID_SPEC,
        f"{asked}, and the rows make {steps} optimizer step{'s' * (steps > 1)}: the learning rate would never reach "
        f"training.learningRate. {lower}, or raise epochs or maxSteps",
    )
