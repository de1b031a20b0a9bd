"""Gradients of adapters equal those that plain autograd finds in PEFT's model with the same dropout masks.

In float64, where nothing but a wrong formula makes a difference; only the adapters' gradient buffers are float32, which is
what the tolerance of 1e-6 is for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor

from mlora_worker.model.architecture import SUPPORTED_TYPES
from mlora_worker.pipeline.engine import StageEngine
from mlora_worker.protocol import LoRAConfig, Training
from mlora_worker.stream.items import Segment, Train
from tests.equivalence.plain_peft import PeftTask
from tests.equivalence.tasks import Base, Row, Task, engines_of, largest_difference, start_of
from tests.fixtures.model_options import FAMILY, TARGETS, TRAINED_VARIANTS

DOUBLE = torch.float64


def gradients(engine: StageEngine, task: str) -> dict[str, Tensor]:
    """By the names in the adapter's file. They are nobody's business but the optimizer's, so no method tells them."""
    adapter = engine._tasks[task].adapter
    return adapter.named(adapter.to_files(adapter.gradient.clone()))


def segment(task: Task, first_row: int, rows: list[Row]) -> Segment:
    return Segment(
        task=task.name,
        step=1,
        lengths=tuple(len(row.ids) for row in rows),
        first_row=first_row,
        weight=1 / task.supervised(1),
        closes_step=False,
    )


def assert_gradients_are_autograds(
    base: Base,
    task: Task,
    neighbours: Sequence[Task],
    recompute: bool,
    config: LoraConfig | None = None,
    limit: float = 1e-6,
) -> None:
    """One step of ``task`` in two microbatches, the first beside ``neighbours``; both in flight before either is back."""
    (engine,) = engines_of(base, 1, dtype=DOUBLE, recompute=recompute)
    start = start_of([engine], task)
    generator = torch.Generator().manual_seed(0)
    for name, tensor in start.items():
        if "lora_B" in name:  # at zero, A would have no gradient
            tensor.normal_(std=0.1, generator=generator)
    for one in (task, *neighbours):
        engine.load(one.load)
    engine.restore(task.name, start)

    own = task.batch(1)
    first = [segment(task, 0, own[:2]), *(segment(one, 0, one.batch(1)) for one in neighbours)]
    microbatches = [
        (tuple(first), own[:2] + [row for one in neighbours for row in one.batch(1)]),
        ((segment(task, 2, own[2:]),), own[2:]),
    ]
    for number, (segments, held) in enumerate(microbatches):
        engine.forward(
            Train(number=number, segments=segments),
            token_ids=torch.tensor([i for row in held for i in row.ids]),
            hidden=None,
            labels=torch.tensor([label for row in held for label in row.labels]),
        )
    for number in (1, 0):
        engine.backward(number, None)

    peft = PeftTask(base, task, start, DOUBLE, config)
    peft.accumulate(1)
    wanted = peft.gradients()
    assert all(tensor.any() for tensor in wanted.values())
    assert largest_difference(gradients(engine, task.name), wanted) < limit


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_beside_a_neighbour_equal_autograds_with_the_same_masks(
    base: Base, rows: Callable[..., list[Row]], dropout: float, recompute: bool
) -> None:
    lora = LoRAConfig(rank=5, alpha=9, dropout=dropout, target_modules=("all-linear",))
    task = Task("t", lora, Training(batch_size=3, gradient_accumulation_steps=2, seed=4), rows(6, 1), 1)
    other = LoRAConfig(rank=3, alpha=1, dropout=0.2, target_modules=("q_proj", "up_proj"))
    neighbour = Task("n", other, Training(batch_size=2, seed=4), rows(2, 2), 1)
    assert_gradients_are_autograds(base, task, [neighbour], recompute)


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_of_modules_with_ranks_and_scales_of_their_own_equal_autograds(
    base: Base, rows: Callable[..., list[Row]], recompute: bool
) -> None:
    """q, k and v read one input, with one mask; here each has another rank and scale, and so has the neighbour."""
    figures: dict[str, Any] = {
        "rank_pattern": {"k_proj": 2, "v_proj": 8, "gate_proj": 3},
        "alpha_pattern": {"v_proj": 2.5, "up_proj": 1},
        "use_rslora": True,
    }
    lora = LoRAConfig(rank=5, alpha=9, dropout=0.3, target_modules=("all-linear",), **figures)
    config = LoraConfig(r=5, lora_alpha=9, target_modules="all-linear", task_type="CAUSAL_LM", **figures)
    task = Task("t", lora, Training(batch_size=3, gradient_accumulation_steps=2, seed=4), rows(6, 1), 1)
    other = LoRAConfig(rank=3, alpha=1, target_modules=("q_proj", "v_proj"), rank_pattern={"q_proj": 4})
    neighbour = Task("n", other, Training(batch_size=2, seed=4), rows(2, 2), 1)
    assert_gradients_are_autograds(base, task, [neighbour], recompute, config)


@pytest.mark.parametrize("kind", [*SUPPORTED_TYPES, *TRAINED_VARIANTS])
def test_gradients_of_every_architecture_equal_autograds(
    small_model: Callable[..., Any], rows: Callable[..., list[Row]], kind: str
) -> None:
    """Recomputed, which is the harder way. PEFT's mini-batches are single rows: a window shorter than the padding leaves
    padded positions nothing to look at, and transformers' eager attention makes NaN of them. It takes its softmax in
    float32, too, whatever the type: that is what the larger limit is for. Gemma 4 does not scale its scores, so what is
    lost there, and in a scale of embeddings that transformers keeps in float32, weighs more: without both it is below 1e-6.
    """
    model_type, options = TRAINED_VARIANTS.get(kind, (kind, FAMILY.get(kind, {})))
    limit = 2e-5 if model_type in ("gemma4", "gemma4_text") else 5e-6
    saved = small_model(model_type, **({"num_hidden_layers": 4} | options))
    lora = LoRAConfig(rank=3, alpha=6, target_modules=TARGETS.get(kind, ("all-linear",)))
    task = Task(
        "t", lora, Training(batch_size=1, gradient_accumulation_steps=4), rows(4, 1, vocabulary=97), 1
    )
    assert_gradients_are_autograds(Base(saved.folder, saved.model), task, [], recompute=True, limit=limit)
