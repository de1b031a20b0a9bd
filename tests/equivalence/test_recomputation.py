"""Activations computed once more in the backward: the same results from less memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mlora_worker.pipeline.engine import StageEngine
from mlora_worker.protocol import LoRAConfig, Training
from mlora_worker.stream.items import Load, Segment, Train
from tests.equivalence.tasks import Base, Row, Task, engines_of, train


def test_recomputation_changes_no_bit(base: Base, rows: Callable[..., list[Row]]) -> None:
    lora = LoRAConfig(rank=4, alpha=8, dropout=0.3, target_modules=("all-linear",))
    training = Training(batch_size=3, learning_rate=2e-3, max_grad_norm=0.5, seed=1)
    narrow = LoRAConfig(rank=2, alpha=8, target_modules=("v_proj",))
    tasks = [Task("a", lora, training, rows(12, 1), 6), Task("b", narrow, training, rows(12, 2), 6)]
    kept, again = (train(base, 2, tasks, budget=60, recompute=recompute) for recompute in (False, True))
    for name in ("a", "b"):
        assert max(kept[name].microbatches) > 1, "several are in flight"
        assert again[name].losses == kept[name].losses
        for key, tensor in kept[name].adapter.items():
            assert torch.equal(again[name].adapter[key], tensor)


TOKENS = 96
LORA = LoRAConfig(rank=4, alpha=8, dropout=0.3, target_modules=("all-linear",))


def kept_bytes(engine: StageEngine, hidden: Tensor) -> int:
    """Of the tensors that autograd keeps between a forward and its backward, the frozen weights left out."""
    engine.load(Load(number=0, task="t", lora=LORA, training=Training()))
    frozen = {tensor.untyped_storage().data_ptr() for tensor in engine.stage.layers.state_dict().values()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in frozen:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    segment = Segment(
        task="t", step=1, lengths=(TOKENS // 2,) * 2, first_row=0, weight=1 / TOKENS, closes_step=True
    )
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        engine.forward(Train(number=1, segments=(segment,)), token_ids=None, hidden=hidden, labels=None)
    back = engine.backward(1, torch.ones_like(hidden))
    assert back.gradient is not None
    assert back.gradient.isfinite().all()
    return sum(kept.values())


@pytest.fixture
def kept(base: Base) -> dict[bool, int]:
    """By whether activations are recomputed, on a middle stage of one layer."""
    hidden = torch.randn(TOKENS, 48, generator=torch.Generator().manual_seed(0))
    return {
        recompute: kept_bytes(engines_of(base, 3, recompute=recompute)[1], hidden)
        for recompute in (False, True)
    }


def test_of_each_layer_its_input_alone_is_kept(kept: dict[bool, int]) -> None:
    one_hidden_state = TOKENS * 48 * 4
    assert kept[True] == one_hidden_state
    assert kept[False] > 10 * kept[True]
