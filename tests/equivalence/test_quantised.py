"""A quantised base: training on it is, bit for bit, training on the plain base that its values make; and it is QLoRA."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mlora_worker.frozen.four_bits import nf4
from mlora_worker.frozen.int8 import int8
from mlora_worker.frozen.linear import Freeze
from mlora_worker.frozen.onednn import OneDnnWeight, available
from mlora_worker.frozen.weight import FrozenWeight
from mlora_worker.protocol import LoRAConfig, Schedule, Training
from tests.equivalence.plain_peft import train_with_peft
from tests.equivalence.tasks import (
    Base,
    Row,
    Task,
    Trained,
    assert_same,
    largest_difference,
    tiny_llama,
    train,
)

NF4: Freeze = partial(nf4, double=True)
ALL = LoRAConfig(rank=8, alpha=16, dropout=0.1, target_modules=("all-linear",))
SOME = LoRAConfig(rank=4, alpha=8, target_modules=("q_proj", "up_proj"))
TRAINING = Training(batch_size=4, learning_rate=2e-3, schedule=Schedule.COSINE, warmup_steps=2, seed=5)


def on_its_values(base: Base, freeze: Freeze, dtype: torch.dtype) -> Base:
    """The plain base whose matrices are those that a quantised one has."""
    model = copy.deepcopy(base.model)
    for module in model.model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = freeze(module.weight.data.to(dtype)).dense(torch.float32)
    return Base(base.folder, model)


def assert_equal(found: Trained, wanted: Trained) -> None:
    assert found.losses == wanted.losses
    assert largest_difference(found.adapter, wanted.adapter) == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("freeze", [NF4, int8], ids=["nf4", "int8"])
def test_training_equals_training_on_a_plain_base_with_the_same_values_bit_for_bit(
    base: Base, rows: Callable[..., list[Row]], freeze: Freeze, stages: int, dtype: torch.dtype
) -> None:
    tasks = [Task("a", ALL, TRAINING, rows(11, 1), 6), Task("b", SOME, TRAINING, rows(9, 2), 6)]
    found = train(base, stages, tasks, budget=90, dtype=dtype, freeze=freeze)
    plain = on_its_values(base, freeze, dtype)
    wanted = train(plain, stages, tasks, budget=90, dtype=dtype)
    for name in found:
        assert_equal(found[name], wanted[name])
    unquantised = train(base, stages, tasks[:1], budget=90, dtype=dtype)["a"]
    assert unquantised.losses != found["a"].losses, "the base is another"


def by_onednn(matrix: Tensor) -> FrozenWeight:
    weight = nf4(matrix, double=True)
    weight.library = OneDnnWeight.library
    return weight


@pytest.mark.skipif(not available(torch.float32), reason="this build of torch has no oneDNN")
def test_the_same_holds_in_onednns_products_and_a_task_has_the_bits_of_itself_alone(
    base: Base, rows: Callable[..., list[Row]]
) -> None:
    tasks = [Task("a", ALL, TRAINING, rows(11, 1), 6), Task("b", SOME, TRAINING, rows(9, 2), 6)]
    found = train(base, 2, tasks, freeze=by_onednn)
    plain = on_its_values(base, NF4, torch.float32)
    wanted = train(plain, 2, tasks, freeze=OneDnnWeight)
    for name in found:
        assert_equal(found[name], wanted[name])
    assert_equal(train(base, 2, tasks[:1], freeze=by_onednn)["a"], found["a"])
    assert found["a"].adapter.keys() == wanted["a"].adapter.keys()


@pytest.mark.parametrize("freeze", [NF4, int8], ids=["nf4", "int8"])
def test_a_neighbour_changes_nothing_nor_does_recomputing(
    base: Base, rows: Callable[..., list[Row]], freeze: Freeze
) -> None:
    own, other = Task("a", ALL, TRAINING, rows(11, 1), 5), Task("b", SOME, TRAINING, rows(9, 2), 5)
    alone = train(base, 1, [own], freeze=freeze)["a"]
    beside = train(base, 2, [own, other], freeze=freeze)["a"]
    assert_same(beside, alone, losses=1e-6, weights=1e-5)
    again = train(base, 1, [own], freeze=freeze, recompute=True)["a"]
    assert_equal(again, alone)


def test_twenty_steps_equal_peft_on_bitsandbytes_own_modules(
    tmp_path: Path, rows: Callable[..., list[Row]]
) -> None:
    """QLoRA as PEFT has it: ``Linear4bit`` in the place of each linear module, with double quantisation. Rows are whole
    blocks, as in published models: the library's own module is wrong for others on a CPU.
    """
    from bitsandbytes.nn import Linear4bit, Params4bit

    base = tiny_llama(tmp_path, tied=True, hidden_size=64, intermediate_size=128)
    model = copy.deepcopy(base.model)
    for name, module in list(model.model.layers.named_modules()):
        if isinstance(module, torch.nn.Linear):
            packed = Linear4bit(
                module.in_features, module.out_features, bias=False, compute_dtype=torch.float32,
                compress_statistics=True, quant_type="nf4",
            )  # fmt: skip
            packed.weight = Params4bit(
                module.weight.data, requires_grad=False, compress_statistics=True, quant_type="nf4"
            )
            # In eval mode it would multiply in bfloat16 on processors that can: nobody trains so.
            packed.support_avx512bf16_for_cpu = False
            parent, _, last = name.rpartition(".")
            setattr(model.model.layers.get_submodule(parent), last, packed.to("cpu"))
    task = Task("t", ALL.model_copy(update={"dropout": 0.0}), TRAINING, rows(17, 3), 20)
    ours = train(base, 2, [task], freeze=NF4)["t"]
    theirs = train_with_peft(Base(base.folder, model), task, ours.start)
    assert_same(ours, theirs, losses=1e-4, weights=1e-3)
    first, last = ours.losses[0], ours.losses[-1]
    assert first is not None
    assert last is not None
    assert last < first
