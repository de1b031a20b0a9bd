"""A finished adapter: the stages' parts joined, checked against what the whole model must have, uploaded."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mlora_worker.coordinator.prepare import BaseModel
from mlora_worker.coordinator.tasks import PreparedTask
from mlora_worker.lora.adapter import expected_keys
from mlora_worker.model.facts import target_linears
from mlora_worker.protocol import AdapterInfo, StepRecord, TaskPlan
from mlora_worker.storage.adapter import InvalidAdapter, adapter_config, check_adapter, publish_adapter
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


def publish_task(
    task: TaskPlan,
    prepared: PreparedTask,
    last: StepRecord | None,
    parts: Sequence[dict[str, Tensor]],
    base: BaseModel,
    store: Store,
) -> AdapterInfo:
    """Check and upload the adapter; its manifest goes last. Raises errors that carry a ``reason``."""
    tensors = join_parts(parts)
    check_adapter(
        tensors, expected_keys(linear.path for linear in target_linears(base.architecture, prepared.targets))
    )
    return publish_adapter(
        store,
        task.output_uri,
        tensors,
        adapter_config(task.lora, base.source.name, base.source.revision, prepared.targets),
        task=task,
        step=last.step if last else 0,
        loss=last.loss if last else None,
        data=prepared.counts,
    )
