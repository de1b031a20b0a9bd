"""A finished adapter: the stages' parts joined, checked against what the whole model must have, uploaded."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mlora_worker.coordinator.prepare import BaseModel
from mlora_worker.coordinator.tasks import PreparedTask
from mlora_worker.lora.adapter import expected_keys
from mlora_worker.model.facts import resolve_targets
from mlora_worker.protocol import AdapterInfo, FailureReason, StepRecord, TaskPlan
from mlora_worker.storage.adapter import (
    FinishedAdapter,
    InvalidAdapter,
    adapter_config,
    check_adapter,
    fingerprint,
    publish_adapter,
)
from mlora_worker.storage.errors import StorageError
from mlora_worker.storage.kept import KeptWork
from mlora_worker.storage.store import Store


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
    last: StepRecord | None,
    parts: Sequence[dict[str, Tensor]],
    base: BaseModel,
) -> FinishedAdapter:
    """The adapter of ``parts``, one of each stage. Raises ``InvalidAdapter`` for one that is of no use."""
    tensors = join_parts(parts)
    check_adapter(
        tensors, expected_keys(target.path for target in resolve_targets(base.facts, task.lora))
    )
    return FinishedAdapter(
        tensors,
        adapter_config(
            task.lora,
            base.source.name,
            base.source.revision,
            prepared.targets,
            fan_in_fan_out=base.architecture.transposed,
        ),
        step=last.step if last else 0,
        loss=last.loss if last else None,
        data=prepared.counts,
    )


def upload(task: TaskPlan, finished: FinishedAdapter, store: Store, kept: KeptWork) -> AdapterInfo:
    """Its manifest goes last. Raises StorageError, and may be called again after one."""
    try:
        with kept.weights(task.uid, fingerprint(task), finished) as weights:
            return publish_adapter(
                store,
                task.output_uri,
                weights,
                finished.config,
                task=task,
                step=finished.step,
                loss=finished.loss,
                data=finished.data,
            )
    except OSError as error:  # of this rank's disk; the adapter is in memory, too
        raise StorageError(
            FailureReason.UPLOAD_FAILED, f"the adapter's file cannot be read before its upload: {error}"
        ) from None
