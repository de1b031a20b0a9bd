"""What a task will write, estimated before it trains, against what its volumes have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from mlora_worker.coordinator.preparation.disk_check import check_disk_space, weights_bytes
from mlora_worker.protocol import Dataset, LoRAConfig, ModelFacts, ModuleShape, TaskPlan, Training
from mlora_worker.storage.errors import StorageError
from mlora_worker.storage.object_store.disk_space import Volume
from mlora_worker.stream.targets import targets_of

FACTS = ModelFacts(
    hidden_size=64, intermediate_size=96, layers=4, attention_heads=4, vocab_size=99, max_positions=64, dtype_bytes=4,
    modules=tuple(
        ModuleShape(
            stage=stage, name=name, in_features=64, out_features=outputs, count=2, first_layer=2 * stage,
            path=f"model.layers.*.self_attn.{name}",
        )
        for stage in (0, 1)
        for name, outputs in (("q_proj", 64), ("v_proj", 32))
    ),
)  # fmt: skip
LORA = LoRAConfig(rank=8, target_modules=("q_proj", "v_proj"))
ADAPTER = 4 * 8 * (128 + 96) * 4  # bytes of rank 8 in four layers


def task(output: str, **more: Any) -> TaskPlan:
    return TaskPlan(
        uid="a", namespace="n", name="a", base_model="m", lora=LORA, dataset=Dataset(inline="{}"),
        training=Training(), output_uri=output, **more,
    )  # fmt: skip


def check(plan: TaskPlan, free: dict[str, int], checkpoints: str = "s3://b/c") -> None:
    """``free``: bytes of each volume, by the folder at its top."""

    def volume(folder: Path) -> Volume:
        top = folder.parts[1]
        return Volume(list(free).index(top), free[top])

    targets = targets_of(FACTS, LORA)
    check_disk_space(plan, targets, checkpoints=checkpoints, scratch=lambda _: Path("/cache"), volume=volume)


def test_the_estimate_is_the_size_of_the_file_but_for_its_header() -> None:
    tensors = {}
    for layer in range(4):
        for name, outputs in (("q_proj", 64), ("v_proj", 32)):
            tensors[f"{layer}.{name}.A"] = torch.zeros(8, 64)
            tensors[f"{layer}.{name}.B"] = torch.zeros(outputs, 8)
    file = save(tensors)
    assert (
        weights_bytes(targets_of(FACTS, LORA))
        == ADAPTER
        == len(file) - 8 - int.from_bytes(file[:8], "little")
    )
    one = LORA.model_copy(update={"target_modules": ("q_proj",)})
    assert weights_bytes(targets_of(FACTS, one)) == 4 * 8 * 128 * 4


ENOUGH = {"out": ADAPTER, "cache": 3 * ADAPTER, "points": 9 * ADAPTER}


@pytest.mark.parametrize(
    ("output", "checkpoints", "free", "told"),
    [
        ("s3://b/a", "s3://b/c", {"cache": 3 * ADAPTER}, None),
        ("s3://b/a", "s3://b/c", {"cache": 3 * ADAPTER - 1}, "for files that wait for their upload"),
        ("file:///out/a", "file:///points/c", ENOUGH, None),
        ("file:///out/a", "file:///points/c", ENOUGH | {"out": ADAPTER - 1}, "for the adapter"),
        ("file:///out/a", "file:///points/c", ENOUGH | {"points": 9 * ADAPTER - 1}, "for 3 checkpoints"),
        ("file:///out/a", "file:///out/a/checkpoints", ENOUGH | {"out": 10 * ADAPTER}, None),
        ("file:///out/a", "file:///out/a/checkpoints", ENOUGH | {"out": 10 * ADAPTER - 1}, "KiB for the adapter)"),
    ],
)  # fmt: skip
def test_a_task_is_refused_when_a_volume_lacks_one_byte(
    output: str, checkpoints: str, free: dict[str, int], told: str | None
) -> None:
    if told is None:
        check(task(output), free, checkpoints)
        return
    with pytest.raises(StorageError, match="make room") as caught:
        check(task(output), free, checkpoints)
    assert told in str(caught.value)


def test_a_task_that_has_trained_is_not_given_up_for_a_disk_that_is_full_now() -> None:
    check(task("file:///out/a", started=True), {"out": 0, "cache": 0})
