"""Target modules, ranks and scales are PEFT's: in what the same words choose, and in what the published file loads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer

from mlora_operator.memory.model import adapter_bytes
from mlora_worker.model.facts import model_facts, resolve_targets
from mlora_worker.protocol import AdapterType, LoRAConfig, ModelFacts, Optimizer, OptimizerType, Training
from mlora_worker.storage.artifacts.adapter import adapter_config
from mlora_worker.stream.items import Load
from mlora_worker.stream.targets import published_names
from tests.equivalence.plain_peft import train_with_peft
from tests.equivalence.tasks import Base, Row, Task, assert_same, engines_of, train
from tests.fixtures.model_options import FAMILY

TRAINING = Training(batch_size=3, learning_rate=1e-3, seed=5)
HYBRIDS = ("lfm2", "qwen3_5_text")
SHAPES: dict[str, dict[str, Any]] = {one: {"num_hidden_layers": 4, **FAMILY[one]} for one in HYBRIDS}
SHAPES["gpt2"] = {"n_inner": 48}
# Model, our words, PEFT's words for the same.
WORDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "names": ("llama", {"target_modules": ["q_proj", "down_proj"]}, {}),
    "ends of paths": ("gpt2", {"target_modules": ["attn.c_proj", "c_fc"]}, {}),
    "all linear": ("gpt_neox", {"target_modules": ["all-linear"]}, {"target_modules": "all-linear"}),
    "all linear, head tied": ("gemma2", {"target_modules": ["all-linear"]}, {"target_modules": "all-linear"}),
    "a pattern": (
        "llama",
        {"target_modules": [r".*layers\.[0-1]\..*q_proj"]},
        {"target_modules": r".*layers\.[0-1]\..*q_proj"},
    ),
    "excluded": (
        "llama",
        {"target_modules": ["q_proj", "v_proj"], "exclude_modules": ["layers.1.self_attn.q_proj"]},
        {},
    ),
    "all linear, convolutions": (
        "lfm2",
        {"target_modules": ["all-linear"]},
        {"target_modules": "all-linear"},
    ),
    "a name in attention and convolution": ("lfm2", {"target_modules": ["conv.out_proj", "w1"]}, {}),
    "all linear, states": (
        "qwen3_5_text",
        {"target_modules": ["all-linear"]},
        {"target_modules": "all-linear"},
    ),
    "layers with states alone": (
        "qwen3_5_text",
        {"target_modules": ["in_proj_qkv", "linear_attn.out_proj"]},
        {},
    ),
    "layers": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "layers_to_transform": [0, 2]}, {}),
    "other ranks and alphas": (
        "llama",
        {
            "target_modules": ["q_proj", "k_proj", "v_proj", "down_proj"],
            "rank_pattern": {"k_proj": 2, r"layers\.1\.self_attn\.v_proj": 7, r"(0|2)\.mlp\.down_proj": 1},
            "alpha_pattern": {"q_proj": 3, "layers.2.mlp.down_proj": 0.5},
        },
        {},
    ),
    "rsLoRA": (
        "llama",
        {"target_modules": ["q_proj", "v_proj"], "use_rslora": True, "rank_pattern": {"v_proj": 9}},
        {},
    ),
}


def in_peft(model: Any, config: LoraConfig) -> dict[str, tuple[int, float]]:
    """Rank and scale of each module that PEFT adapts."""
    return {
        name.removeprefix("base_model.model."): (module.r["default"], module.scaling["default"])
        for name, module in get_peft_model(copy.deepcopy(model), config).named_modules()
        if isinstance(module, LoraLayer)
    }


def published(facts: ModelFacts, lora: LoRAConfig, transposed: bool) -> LoraConfig:
    names = published_names(facts, resolve_targets(facts, lora))
    return LoraConfig(**adapter_config(lora, "org/tiny", None, names, fan_in_fan_out=transposed))


@pytest.mark.parametrize("story", WORDS)
def test_the_same_words_choose_the_same_modules_as_in_peft_and_so_does_the_published_file(
    small_model: Any, story: str
) -> None:
    model_type, ours, theirs = WORDS[story]
    saved = small_model(model_type, **SHAPES.get(model_type, {}))
    lora = LoRAConfig(rank=4, alpha=6, **ours)
    facts = model_facts(saved.folder, 2, torch.float32)
    found = {target.path: (target.rank, target.scale) for target in resolve_targets(facts, lora)}
    said = LoraConfig(r=4, lora_alpha=6, task_type="CAUSAL_LM", **(ours | theirs))
    assert in_peft(saved.model, said) == found
    assert in_peft(saved.model, published(facts, lora, model_type == "gpt2")) == found


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_modules_with_ranks_and_scales_of_their_own_train_as_in_peft(
    base: Base, rows: Callable[..., list[Row]], dropout: float
) -> None:
    """q, k and v share an input; here their products have three ranks and scales, and in one layer k has none."""
    lora = LoRAConfig(
        rank=5,
        alpha=9,
        dropout=dropout,
        target_modules=("q_proj", "k_proj", "v_proj", r".*\.2\.mlp\..*"),
        exclude_modules=("layers.1.self_attn.k_proj",),
        rank_pattern={"k_proj": 2, "v_proj": 8, "gate_proj": 3},
        alpha_pattern={"v_proj": 2.5, "up_proj": 1},
        use_rslora=True,
    )
    task = Task("t", lora, TRAINING, rows(12, 1), 6)
    neighbour = Task("n", LoRAConfig(rank=3, target_modules=("q_proj", "v_proj")), TRAINING, rows(5, 2), 2)
    config = published(model_facts(base.folder, 1, torch.float32), lora, False)
    config.lora_dropout = 0.0  # by our masks, where there is any
    config.inference_mode = False
    one, two = (train(base, stages, [task, neighbour])["t"] for stages in (1, 2))
    theirs = train_with_peft(base, task, one.start, config=config)
    for ours in (one, two):
        assert_same(ours, theirs, losses=1e-4, weights=1e-4)
    shapes = {name.split("layers.")[1]: tuple(tensor.shape) for name, tensor in one.adapter.items()}
    assert shapes["0.self_attn.k_proj.lora_A.weight"] == (2, 48)
    assert shapes["2.self_attn.v_proj.lora_B.weight"] == (24, 8)
    assert not any(name.startswith("1.self_attn.k_proj") for name in shapes)


def test_layers_that_are_left_out_train_as_in_peft(base: Base, rows: Callable[..., list[Row]]) -> None:
    """The first stage has no adapter at all: nothing is to be computed backward there."""
    lora = LoRAConfig(rank=4, alpha=8, target_modules=("all-linear",), layers_to_transform=(2,))
    task = Task("t", lora, TRAINING, rows(12, 1), 4)
    config = published(model_facts(base.folder, 1, torch.float32), lora, False)
    config.inference_mode = False
    one, three = (train(base, stages, [task])["t"] for stages in (1, 3))
    theirs = train_with_peft(base, task, one.start, config=config)
    for ours in (one, three):
        assert_same(ours, theirs, losses=1e-4, weights=1e-4)


@pytest.mark.parametrize(
    "lora",
    [
        LoRAConfig(rank=5, target_modules=("all-linear",), rank_pattern={"k_proj": 2, r"[01]\.mlp\..*": 9}),
        LoRAConfig(rank=4, target_modules=("q_proj", "up_proj"), layers_to_transform=(0, 2)),
        LoRAConfig(rank=4, target_modules=(r".*\.1\..*",), exclude_modules=("o_proj",)),
        LoRAConfig(rank=4, target_modules=("q_proj", "up_proj"), use_dora=True),
        LoRAConfig(
            type=AdapterType.VERA, rank=33, target_modules=("q_proj", "up_proj"), layers_to_transform=(0,)
        ),
    ],
    ids=["ranks", "layers", "pattern", "dora", "vera"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operator_counts_the_bytes_that_the_stages_take(
    base: Base, lora: LoRAConfig, dtype: torch.dtype
) -> None:
    facts = model_facts(base.folder, 2, dtype)
    for stage, engine in enumerate(engines_of(base, 2, dtype=dtype)):
        for name, numbers, moments in (("t", None, 2), ("l", Optimizer(type=OptimizerType.LION), 1)):
            training = TRAINING.model_copy(update={"optimizer": numbers})
            engine.load(Load(number=0, task=name, lora=lora, training=training))
            assert engine.task_bytes(name) == adapter_bytes(lora, facts, stage, moments)
