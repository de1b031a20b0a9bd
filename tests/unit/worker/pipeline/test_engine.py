"""The engine's rules: what may be in flight, what is refused, what is not computed."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from mlora_worker.model.errors import UnknownTargetModule
from mlora_worker.model.load import load_stage
from mlora_worker.pipeline.engine import StageEngine
from mlora_worker.pipeline.results import OutOfOrder
from mlora_worker.protocol import LoRAConfig, Training
from mlora_worker.stream.items import Load, Segment, Train, Update

UPDATE = Update(step=1, learning_rate=0.1, clip=1.0)
IDS = torch.arange(12)


@pytest.fixture
def engines(tmp_path: Path) -> Any:
    """``engines(stages, dtype)`` of a tiny random Llama."""
    torch.manual_seed(1)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
        initializer_range=0.1,
    )
    config.save_pretrained(tmp_path)
    weights = LlamaForCausalLM(config).state_dict()

    class Source:
        def names(self) -> set[str]:
            return set(weights)

        def tensor(self, name: str) -> Tensor:
            return weights[name]

    def make(stages: int = 1, dtype: torch.dtype = torch.float32) -> list[StageEngine]:
        cpu = torch.device("cpu")
        return [StageEngine(load_stage(tmp_path, Source(), i, stages, dtype, cpu)) for i in range(stages)]

    return make


def load(task: str, *targets: str, dropout: float = 0.0) -> Load:
    lora = LoRAConfig(rank=4, alpha=8, dropout=dropout, target_modules=targets or ("q_proj", "v_proj"))
    return Load(number=0, task=task, lora=lora, training=Training(seed=1))


def train(number: int, *tasks: str, update: Update | None = None, closes: bool = True) -> Train:
    return Train(
        number=number,
        segments=tuple(
            Segment(
                task=task, step=1, lengths=(5, 7), first_row=0, weight=0.1, closes_step=closes, update=update
            )
            for task in tasks
        ),
    )


def there(engine: StageEngine, item: Train) -> Tensor:
    ids = IDS.repeat(len(item.segments))
    losses = engine.forward(item, token_ids=ids, hidden=None, labels=ids + 1).losses
    assert losses is not None
    return losses


def test_microbatches_in_flight_come_back_in_any_order(engines: Any) -> None:
    norms = []
    for order in ([1, 2], [2, 1]):
        (engine,) = engines()
        for task in ("a", "b"):
            engine.load(load(task, dropout=0.2))
        there(engine, train(1, "a"))
        there(engine, train(2, "b"))
        norms.append({number: engine.backward(number, None).squared_norms for number in order})
    assert torch.equal(norms[0][1], norms[1][1])
    assert torch.equal(norms[0][2], norms[1][2])


def test_the_norm_is_told_when_the_step_closes_only(engines: Any) -> None:
    (engine,) = engines()
    engine.load(load("a"))
    there(engine, train(1, "a", closes=False))
    assert engine.backward(1, None).squared_norms.tolist() == [0.0]
    there(engine, train(2, "a"))
    assert engine.backward(2, None).squared_norms.item() > 0


def test_an_update_rides_before_the_forward(engines: Any) -> None:
    (engine,) = engines()
    engine.load(load("a"))
    first = there(engine, train(1, "a"))
    engine.backward(1, None)
    second = there(engine, train(2, "a", update=UPDATE))
    assert second.item() < first.item()


def test_an_update_of_a_task_in_flight_is_refused(engines: Any) -> None:
    (engine,) = engines()
    engine.load(load("a"))
    there(engine, train(1, "a"))
    with pytest.raises(OutOfOrder, match="step 1 of task a while a microbatch of it is in flight"):
        there(engine, train(2, "a", update=UPDATE))


def test_an_abandoned_microbatch_holds_nothing_back(engines: Any) -> None:
    (engine,) = engines()
    engine.load(load("a"))
    there(engine, train(1, "a"))
    engine.abandon(1)
    engine.apply("a", UPDATE)


def test_a_forward_that_failed_holds_no_memory_once_it_is_abandoned(engines: Any) -> None:
    (engine,) = engines()
    engine.load(load("a", "all-linear"))
    held: list[weakref.ref[Tensor]] = []
    below, broken = engine.stage.layers[0], engine.stage.layers[2].mlp.up_proj
    below.register_forward_hook(lambda *call: held.append(weakref.ref(call[2])))
    # Between two modules that share their input, whose outputs are computed together.
    hook = broken.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        there(engine, train(1, "a"))
    engine.abandon(1)
    gc.collect()
    assert [one() for one in held] == [None]
    hook.remove()
    assert there(engine, train(2, "a")).isfinite().all()


def test_a_discarded_step_is_as_if_it_had_not_been(engines: Any) -> None:
    norms = []
    for tries in (1, 2):
        (engine,) = engines()
        engine.load(load("a", dropout=0.2))
        for number in range(tries):
            item = train(number, "a")
            segments = (item.segments[0].model_copy(update={"discard": number > 0}),)
            there(engine, item.model_copy(update={"segments": segments}))
            norms.append(engine.backward(number, None).squared_norms.item())
    assert norms[0] == norms[1] == norms[2] > 0


def test_a_step_is_not_discarded_while_a_microbatch_of_it_is_in_flight(engines: Any) -> None:
    (engine,) = engines()
    engine.load(load("a"))
    there(engine, train(1, "a"))
    with pytest.raises(OutOfOrder, match="discarded while a microbatch"):
        engine.discard("a")


def test_a_task_may_leave_while_a_microbatch_of_it_is_in_flight(engines: Any) -> None:
    (engine,) = engines()
    engine.load(load("a"))
    engine.load(load("b"))
    there(engine, train(1, "a", "b"))
    engine.unload("a")
    assert (engine.backward(1, None).squared_norms > 0).all()
    with pytest.raises(OutOfOrder, match="task a is not loaded"):
        there(engine, train(2, "a"))


def test_nothing_of_a_task_that_has_left_is_held(engines: Any) -> None:
    (engine,) = engines()
    engine.load(load("a", "all-linear", dropout=0.1))
    there(engine, train(1, "a"))
    engine.backward(1, None)
    adapter = engine._task("a").adapter
    views = (*(stack.a for stack in adapter.compute), *(stack.a for stack in adapter.gradients))
    held = [weakref.ref(one) for one in (adapter, adapter.parameters, adapter.gradient, *views)]
    del adapter, views
    engine.unload("a")
    gc.collect()
    assert [one() for one in held] == [None] * len(held)


def test_an_unknown_target_leaves_no_task_behind(engines: Any) -> None:
    (engine,) = engines()
    with pytest.raises(UnknownTargetModule):
        engine.load(load("a", "qproj"))
    engine.load(load("a", "q_proj"))


def test_a_task_that_went_nan_leaves_its_neighbour_as_it_is(engines: Any) -> None:
    results = []
    for broken in (False, True):
        (engine,) = engines()
        engine.load(load("a"))
        engine.load(load("b"))
        if broken:
            engine._task("a").adapter.parameters.detach().fill_(torch.nan)
        losses = there(engine, train(1, "a", "b"))
        norms = engine.backward(1, None).squared_norms
        assert bool(losses[0].isfinite()) is not broken
        results.append((losses[1], norms[1]))
    assert results[0] == results[1]


def test_nothing_is_kept_below_the_lowest_adapted_module_of_stage_0(engines: Any) -> None:
    first, _ = engines(2)
    first.load(load("a", "down_proj"))
    graph = {}
    layer = first.stage.layers[0]
    layer.self_attn.register_forward_hook(lambda *call: graph.update(attention=call[2][0].requires_grad))
    layer.mlp.up_proj.register_forward_hook(lambda *call: graph.update(up=call[2].requires_grad))
    layer.mlp.register_forward_hook(lambda *call: graph.update(mlp=call[2].requires_grad))
    out = first.forward(train(1, "a"), token_ids=IDS, hidden=None, labels=None)
    assert graph == {"attention": False, "up": False, "mlp": True}
    assert out.hidden is not None
    assert first.backward(1, torch.ones_like(out.hidden)).gradient is None


def test_a_later_stage_hands_a_gradient_down_without_adapters_of_its_own(engines: Any) -> None:
    _, last = engines(2)
    last.load(load("a"))
    hidden = torch.randn(12, 32)
    last.forward(train(1, "a"), token_ids=None, hidden=hidden, labels=IDS)
    gradient = last.backward(1, None).gradient
    assert gradient is not None
    assert gradient.shape == hidden.shape
    assert gradient.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_base_in_half_precision_learns_with_float32_adapters(engines: Any, dtype: torch.dtype) -> None:
    chain = engines(2, dtype)
    for engine in chain:
        engine.load(load("a", "all-linear", dropout=0.1))
    losses = []
    for number in range(1, 9):
        update = Update(step=number - 1, learning_rate=0.01, clip=1.0) if number > 1 else None
        item = train(number, "a", update=update)
        hidden = chain[0].forward(item, token_ids=IDS, hidden=None, labels=None).hidden
        assert hidden is not None
        assert hidden.dtype == dtype
        out = chain[1].forward(item, token_ids=None, hidden=hidden, labels=IDS + 1)
        assert out.losses is not None
        losses.append(out.losses.item())
        chain[0].backward(number, chain[1].backward(number, None).gradient)
    assert losses[-1] < 0.8 * losses[0]
    assert {tensor.dtype for engine in chain for tensor in engine.export("a").values()} == {torch.float32}


def test_tokens_that_do_not_match_the_segments_are_refused(engines: Any) -> None:
    (engine,) = engines()
    engine.load(load("a"))
    with pytest.raises(OutOfOrder, match="has 11 tokens, its segments 12"):
        engine.forward(train(1, "a"), token_ids=IDS[:11], hidden=None, labels=IDS[:11])
