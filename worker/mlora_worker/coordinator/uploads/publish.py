"""A finished adapter: the stages' parts joined, checked against what the whole model must have, uploaded."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mlora_worker.coordinator.preparation.expected_tensors import expected_tensors, random_matrices
from mlora_worker.coordinator.preparation.prepare import BaseModel
from mlora_worker.coordinator.task.outcome import TrainingResult
from mlora_worker.coordinator.task.prepared import PreparedTask
from mlora_worker.model.facts import resolve_targets
from mlora_worker.protocol import AdapterDtype, AdapterInfo, FailureReason, TaskPlan
from mlora_worker.storage.artifacts.adapter import (
    FinishedAdapter,
    InvalidAdapter,
    adapter_config,
    as_written,
    check_adapter,
    fingerprint,
    named_base,
    publish_adapter,
)
from mlora_worker.storage.artifacts.aside import Aside
from mlora_worker.storage.artifacts.local_spool import LocalSpool
from mlora_worker.storage.errors import StorageError
from mlora_worker.storage.object_store.store import Store


def join_parts(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """One dictionary of the stages' tensors, in the order of the stages. Raises ``InvalidAdapter`` on a duplicate."""
    whole: dict[str, Tensor] = {}
    for part in parts:
        twice = whole.keys() & part.keys()
        if twice:
            raise InvalidAdapter(f"two stages sent {sorted(twice)[0]}")
        whole.update(part)
    return whole


def finished_adapter(
    task: TaskPlan,
    prepared: PreparedTask,
    outcome: TrainingResult,
    parts: Sequence[dict[str, Tensor]],
    base: BaseModel,
    aside: Aside | None = None,
) -> FinishedAdapter:
    """The adapter of ``parts``, one of each stage. Raises ``InvalidAdapter`` for one that is of no use."""
    if outcome.last is None or not outcome.updates:
        raise InvalidAdapter(
            "the adapter was not published: no step had a supervised token, so it has not learned anything"
        )
    targets = resolve_targets(base.facts, task.lora)
    tensors = as_written(join_parts(parts), task.output_dtype)
    check_adapter(tensors, expected_tensors(targets))
    tensors |= as_written(random_matrices(task.lora, task.training.seed, targets), task.output_dtype)
    return FinishedAdapter(
        # The parts are there already; what was made of them is not.
        aside.put(tensors)
        if aside is not None and task.output_dtype is not AdapterDtype.FLOAT32
        else tensors,
        adapter_config(
            task.lora,
            *named_base(task, base.source),
            prepared.targets,
            fan_in_fan_out=base.architecture.transposed,
            seed=task.training.seed,
        ),
        step=outcome.step,
        loss=outcome.last.loss,
        data=prepared.counts,
        evaluation=outcome.evaluation,
        history=outcome.history,
        quantization=base.quantization,
        base_type=base.architecture.model_type if task.lora.target_parameters else None,
    )


def upload(task: TaskPlan, finished: FinishedAdapter, store: Store, spool: LocalSpool) -> AdapterInfo:
    """Its manifest goes last. Raises StorageError, and may be called again after one."""
    try:
        with spool.weights(task.uid, fingerprint(task), finished) as weights:
            return publish_adapter(
                store,
                task.output_uri,
                weights,
                finished.config,
                task=task,
                step=finished.step,
                loss=finished.loss,
                data=finished.data,
                evaluation=finished.evaluation,
                history=finished.history,
                quantization=finished.quantization,
                base_type=finished.base_type,
            )
    except OSError as error:  # of this rank's disk; the adapter is in memory, too
        raise StorageError(
            FailureReason.UPLOAD_FAILED, f"the adapter's file cannot be read before its upload: {error}"
        ) from None
