"""A task that begins with another adapter's weights has them on every stage, and fresh moments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from safetensors.torch import save

from mlora_worker.coordinator.task.prepared import InitialState
from mlora_worker.protocol import LoRAConfig, Schedule, Training
from mlora_worker.storage.artifacts.checkpoint import stage_part
from tests.equivalence.tasks import Base, Row, Task, engines_of, largest_difference, train
from tests.fixtures.threaded import ThreadedPipeline

LORA = LoRAConfig(rank=4, alpha=8, target_modules=("q_proj", "down_proj"))
TRAINING = Training(batch_size=4, learning_rate=5e-3, schedule=Schedule.CONSTANT, seed=5)


@pytest.mark.parametrize(
    "lora", [LORA, LORA.model_copy(update={"layers_to_transform": (0,)})], ids=["all", "first"]
)
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_its_first_step_is_made_from_the_other_adapters_weights(
    base: Base, rows: Callable[..., list[Row]], stages: int, lora: LoRAConfig
) -> None:
    """With hardly any learning rate nothing moves; the loss is what the other adapter had at that point.

    Of an adapter of the first layer, nothing lies on the later stages.
    """
    former = Task("former", lora, TRAINING, rows(8, 1), 6)
    adapter = train(base, 1, [former])["former"].adapter
    still = TRAINING.model_copy(update={"learning_rate": 1e-9, "seed": 77})
    task = Task("next", lora, still, rows(8, 1), 1)
    engines = engines_of(base, stages)
    parts = [stage_part(adapter, engine.stage.layer_range) for engine in engines]
    run = task.prepared()
    assert run.prepared is not None
    payloads = {stage: save(part) for stage, part in enumerate(parts) if stage > 0 and part}
    run.prepared = replace(run.prepared, initial=InitialState(parts[0], payloads))
    pipeline = ThreadedPipeline(engines, {"next": run}).run()
    assert pipeline.error is None
    assert largest_difference(pipeline.adapters["next"], adapter) < 1e-5
    fresh = train(base, 1, [task])["next"]
    assert fresh.losses[0] is not None
    assert pipeline.losses["next"][1] is not None
    assert pipeline.losses["next"][1] < fresh.losses[0] - 0.01
