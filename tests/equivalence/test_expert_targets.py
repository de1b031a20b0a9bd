"""Which modules of a mixture words mean, in PEFT and here, and how dense layers and shared experts are reached."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from mlora_worker.model.errors import InvalidTarget, UnknownTargetModule
from mlora_worker.model.facts import model_facts, resolve_targets
from mlora_worker.protocol import AdapterType, LoRAConfig, Training
from tests.equivalence.mixtures import published
from tests.equivalence.plain_peft import train_with_peft
from tests.equivalence.tasks import Base, Row, Task, assert_same, train
from tests.fixtures.model_options import EXPERT_TYPES, FAMILY, TARGETS

ROUTERS = ("mlp.gate", "mlp.gate.wg", "mlp.router", "mlp.router.gate", "feed_forward.router")


def adapted_by_peft(model: Any, words: Any) -> set[str]:
    found = get_peft_model(copy.deepcopy(model), LoraConfig(r=3, target_modules=words, task_type="CAUSAL_LM"))
    return {
        name.removeprefix("base_model.model.").partition(".lora_A")[0]
        for name, _ in found.named_parameters()
        if "lora_A" in name
    }


@pytest.mark.parametrize("model_type", EXPERT_TYPES)
def test_all_linear_is_what_it_is_in_peft_or_refused(small_model: Any, model_type: str) -> None:
    saved = small_model(model_type, **FAMILY[model_type])
    facts, theirs = model_facts(saved.folder, 2, torch.float32), adapted_by_peft(saved.model, "all-linear")
    every = LoRAConfig(rank=1, target_modules=("all-linear",))
    if not any(stack.in_peft for stack in facts.experts or ()):
        assert {target.path for target in resolve_targets(facts, every)} == theirs
        return
    routed = any(".experts" in path for path in theirs)
    assert routed or model_type in ("llama4_text", "phimoe"), "PEFT adapts them"
    assert any(path.endswith(ROUTERS) for path in theirs)
    with pytest.raises(InvalidTarget, match=r"all-linear adapts the routed experts.*such as \[(q_|in_)"):
        resolve_targets(facts, every)
    of_vera = LoRAConfig(
        type=AdapterType.VERA, rank=3, target_modules=("all-linear",)
    )  # for which PEFT changes no word
    linear = {name for name, one in saved.model.named_modules() if isinstance(one, torch.nn.Linear)}
    linear = {name for name in linear if name != "lm_head" and not name.endswith(ROUTERS)}
    assert {target.path for target in resolve_targets(facts, of_vera)} == linear
    named = LoRAConfig(rank=3, target_modules=TARGETS[model_type])
    ours = {target.path for target in resolve_targets(facts, named)}
    assert ours == adapted_by_peft(saved.model, [*TARGETS[model_type]])
    if model_type == "llama4_text":  # nothing but its router is refused
        assert ours == {path for path in theirs if not path.endswith(ROUTERS)}
        return
    assert ours == {path for path in theirs if "_attn" in path}
    assert not any("shared_expert" in path and "gate" not in path for path in theirs), (
        "and these it leaves out"
    )


@pytest.mark.parametrize(
    ("model_type", "entry", "error", "told"),
    [
        (
            "mixtral",
            "w1",
            InvalidTarget,
            "w1 means the routed experts .* remove it, and name experts in targetParameters",
        ),
        ("olmoe", "mlp.gate", InvalidTarget, "means the routed experts"),
        (
            "qwen3_moe",
            "up_proj",
            InvalidTarget,
            r"write a pattern, .* such as \.\*\\\.mlp\.(gate|up)_proj",
        ),
        (
            "olmoe",
            "experts.gate_up_proj",
            UnknownTargetModule,
            "routed experts belong in targetParameters, and a router gets no adapter",
        ),
        ("granitemoe", "router", UnknownTargetModule, "a router gets no adapter"),
        (
            "llama4_text",
            "feed_forward.router",
            InvalidTarget,
            "router means the routed experts or the router",
        ),
        ("mixtral", "lm_head", UnknownTargetModule, "the head and the embeddings"),
    ],
)
def test_experts_and_routers_are_refused_by_name(
    small_model: Any, model_type: str, entry: str, error: type[Exception], told: str
) -> None:
    facts = model_facts(small_model(model_type, **FAMILY[model_type]).folder, 1, torch.float32)
    with pytest.raises(error, match=told):
        resolve_targets(facts, LoRAConfig(rank=3, target_modules=("q_proj", entry)))


DENSE = r".*\.(gate|up|down)_proj"


@pytest.mark.parametrize(
    ("model_type", "parts"),
    [
        ("deepseek_v3", ("mlp", "mlp.shared_experts")),
        ("glm4_moe", ("mlp", "mlp.shared_experts")),
        ("hunyuan_v1_moe", ("mlp.shared_mlp",)),
        ("afmoe", ("mlp", "mlp.shared_experts", "self_attn")),
        ("exaone_moe", ("mlp", "mlp.shared_experts")),
        ("qwen3_moe", ("mlp",)),
        ("qwen3_next", ("mlp", "mlp.shared_expert")),
    ],
)
def test_dense_layers_and_shared_experts_train_as_in_peft_and_load_there(
    small_model: Any, tmp_path: Path, rows: Callable[..., list[Row]], model_type: str, parts: tuple[str, ...]
) -> None:
    """PEFT takes gate_proj for the routed experts: those of others are parameters for it."""
    saved = small_model(model_type, **FAMILY[model_type])
    base = Base(saved.folder, saved.model)
    asked = LoRAConfig(rank=4, alpha=6, target_modules=("o_proj", DENSE))
    task = Task("t", asked, Training(batch_size=1, learning_rate=1e-3, seed=1), rows(6, 1, vocabulary=97), 6)
    trained = train(base, 2, [task])["t"]
    published(base, asked, tmp_path, trained)
    config = LoraConfig.from_pretrained(tmp_path)
    config.inference_mode = False
    names = [
        f"{part}.{one}_proj.weight"
        for part in parts
        for one in (("gate",) if part == "self_attn" else ("down", "gate", "up"))
    ]
    assert config.target_parameters == sorted(names)
    theirs = train_with_peft(base, task, trained.start, config=config)
    assert_same(trained, theirs, losses=1e-4, weights=1e-4)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        PeftModel.from_pretrained(copy.deepcopy(saved.model), tmp_path)
    for wrong in ({"dropout": 0.1}, {"rank_pattern": {"up_proj": 2}}, {"use_dora": True}):
        with pytest.raises(InvalidTarget, match="target_parameters"):
            resolve_targets(model_facts(base.folder, 1, torch.float32), asked.model_copy(update=wrong))
