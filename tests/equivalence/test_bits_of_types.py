"""Of every type of model, a task has the bits of itself alone beside any neighbours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mlora_worker.model.architecture import SUPPORTED_TYPES
from mlora_worker.protocol import LoRAConfig, Training
from tests.equivalence.tasks import Base, Row, Task, largest_difference, train
from tests.fixtures.model_options import FAMILY, TARGETS, TRAINED_VARIANTS

TRAINING = Training(batch_size=3, learning_rate=2e-3, seed=5)
STEPS = 5
_WIDTHS = (
    "moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size",
    "moe_shared_expert_intermediate_size",
)  # fmt: skip


def wide(small_model: Callable[..., Any], kind: str) -> Base:
    """Wide enough for products whose bits depend on the number of rows; heads fill whole vectors, as all published ones do:
    where a row of a product begins in memory would matter, too."""
    model_type, own = TRAINED_VARIANTS.get(kind, (kind, FAMILY.get(kind, {})))
    sizes: dict[str, Any] = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 64}
    sizes |= {name: 64 for name in _WIDTHS if name in own}
    if own.get("hidden_size_per_layer_input"):
        sizes["hidden_size_per_layer_input"] = 64
    if "kv_lora_rank" in own:
        sizes |= {"head_dim": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32}
    rope = dict(own.get("rope_parameters") or {})
    for name in ("mrope_section", "short_factor", "long_factor"):
        if name in rope:
            rope[name] = [one * 4 for one in rope[name]] if name == "mrope_section" else rope[name] * 4
            sizes["rope_parameters"] = rope
    saved = small_model(model_type, **(own | sizes))
    return Base(saved.folder, saved.model)


@pytest.mark.parametrize("kind", [*SUPPORTED_TYPES, *TRAINED_VARIANTS])
def test_a_task_has_the_bits_of_itself_alone_beside_any_neighbour(
    small_model: Callable[..., Any], rows: Callable[..., list[Row]], kind: str
) -> None:
    base = wide(small_model, kind)
    lora = LoRAConfig(rank=4, target_modules=TARGETS.get(kind, ("all-linear",)))
    own = Task("own", lora, TRAINING, rows(11, 1, vocabulary=97), STEPS)
    others = [Task(f"other-{n}", lora, TRAINING, rows(5 + n, n + 2, vocabulary=97), STEPS) for n in range(2)]
    alone = train(base, 1, [own])["own"]
    for company in ([others[0], own], [others[1], own, others[0]]):
        beside = train(base, 1, company)["own"]
        assert beside.losses == alone.losses
        assert largest_difference(beside.adapter, alone.adapter) == 0.0
