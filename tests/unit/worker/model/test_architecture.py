"""Which models are supported, and which are refused. That each is computed as transformers does: tests/equivalence."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from mlora_worker.model.architecture import meta_model, read_architecture
from mlora_worker.model.errors import UnsupportedModel
from mlora_worker.model.families import Family
from tests.fixtures.model_options import LONG_ROPE


def test_the_shape_is_read_from_the_configuration_alone(small_model: Any) -> None:
    architecture = read_architecture(small_model("llama").folder)
    assert (architecture.layers, architecture.hidden_size, architecture.max_positions) == (3, 32, 64)
    assert len(architecture.linears) == 21
    assert architecture.linears[1].path == "model.layers.0.self_attn.k_proj"
    assert architecture.linears[1].name == "k_proj"
    assert architecture.layer_costs() == [32 * 32 * 2 + 32 * 16 * 2 + 32 * 48 * 3] * 3


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": ["llama"]},
        {"hidden_size": 0},
        {"hidden_size": -64},
        {"num_attention_heads": 0},
        {"num_key_value_heads": 0},
        {"head_dim": 0},
        {"num_hidden_layers": 0},
        {"num_hidden_layers": -1},
        {"intermediate_size": 0},
        {"vocab_size": 0},
        {"max_position_embeddings": 0},
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": 10**300},
        {"hidden_size": 2**40},
        {"vocab_size": 10**12},
        {"hidden_act": "no such function"},
        {"pad_token_id": 99999},
        {"dtype": "float99"},
        {"quantization_config": "x"},
    ],
    ids=str,
)
def test_a_configuration_that_no_model_can_have_is_refused_by_its_name(
    small_model: Any, tmp_path: Path, change: dict[str, Any]
) -> None:
    config = json.loads((small_model("llama").folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(UnsupportedModel, match=r"config\.json of the base model"):
        read_architecture(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "null", "3", "[]", "[" * 100_000], ids=["empty", "null", "3", "[]", "deep"]
)
def test_what_is_no_configuration_is_refused_as_such(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UnsupportedModel, match=r"config\.json of the base model"):
        read_architecture(tmp_path)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model_type": "bert"}, "model type bert is not supported; supported types: afmoe, apertus, "),
        (
            {"model_type": "bloom"},
            "model type bloom is not supported: .* a bias by distance, .*; supported types",
        ),
        (
            {"model_type": "llama4_text", "attention_chunk_size": 0},
            "attention_chunk_size is 0, which must be at least 1",
        ),
        (
            {
                "model_type": "llama4_text",
                "attention_chunk_size": None,
                "layer_types": ["chunked_attention"] * 3,
            },
            "attention_chunk_size is None, which must be at least 1",
        ),
        ({"model_type": "llama4_text", "floor_scale": 0}, "floor_scale is 0, which must be at least 1"),
        ({"model_type": "llama4_text", "no_rope_layers": [1]}, r"cannot be used: (.|\n)*`layer_types` \(1\)"),
        (
            {"model_type": "llama4_text", "output_router_logits": True},
            "output_router_logits.* auxiliary loss",
        ),
        ({"model_type": "mixtral", "output_router_logits": True}, "output_router_logits.* auxiliary loss"),
        ({"model_type": "olmo", "clip_qkv": 8.0}, "clip_qkv 8.0 is not supported: .* clipped"),
        ({"model_type": "olmoe", "clip_qkv": 8.0}, "clip_qkv 8.0 is not supported: .* clipped"),
        (
            {"model_type": "mixtral", "num_experts_per_tok": 9, "num_local_experts": 8},
            "a token takes 9 of 8 experts",
        ),
        ({"model_type": "no-such-model"}, "no-such-model"),
        # transformers would make a list of them all.
        (
            {"model_type": "llama4_text", "num_hidden_layers": 10**12},
            "num_hidden_layers is 1000000000000, .* 4096",
        ),
        ({"model_type": "qwen2", "num_hidden_layers": 1e12}, "num_hidden_layers is .* more than 4096"),
        (
            {"model_type": "llama4", "text_config": {"num_hidden_layers": 10**12}},
            "num_hidden_layers is 1000000000000",
        ),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, r"quantised \(gptq\)"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
            "rope type dynamic",
        ),
        (
            {"model_type": "hunyuan_v1_dense", "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            "rope type dynamic",
        ),
        ({"model_type": "qwen2_moe", "use_sliding_window": True}, "qwen2_moe with use_sliding_window True"),
        (
            {"rope_parameters": {"rope_type": "proportional"}},
            "rope type proportional .* supported types: default",
        ),
        (
            {
                "model_type": "olmo3",
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                    "full_attention": LONG_ROPE,
                },
            },
            "longrope of some layers alone",
        ),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0}}, "cannot be used: .*'factor'"),
        (
            {"model_type": "olmo3", "layer_types": ["full_attention"] * 2},
            r"cannot be used: (.|\n)*`layer_types`",
        ),
    ],
)
def test_what_would_be_computed_wrong_is_refused(small_model: Any, change: dict[str, Any], told: str) -> None:
    folder = small_model("llama").folder
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UnsupportedModel, match=told):
        read_architecture(folder)


def tiny(model_type: str, **options: Any) -> Any:
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9}
    return AutoConfig.for_model(model_type, **(shape | options))


@pytest.mark.parametrize(
    ("story", "config", "told"),
    [
        ("an unknown type", tiny("persimmon", intermediate_size=48), "model type persimmon is not supported"),
        (
            "its text part is another type",
            AutoConfig.for_model("llava", text_config={"model_type": "gpt2"}),
            "text part of this llava model is of type gpt2.*; supported types: llama, mistral, qwen2",
        ),
        (
            "a packed projection to inputs of layers",
            AutoConfig.for_model(
                "gemma3n_text",
                num_hidden_layers=5,
                num_kv_shared_layers=0,
                quantization_config={"quant_method": "fp8"},
            ),
            "a quantised checkpoint of gemma3n_text .* with model.quantization",
        ),
        (
            "keys shared without inputs",
            AutoConfig.for_model(
                "gemma4_text", num_hidden_layers=12, num_kv_shared_layers=6, hidden_size_per_layer_input=0
            ),
            "num_kv_shared_layers without hidden_size_per_layer_input",
        ),
        (
            "keys that no layer makes",
            AutoConfig.for_model(
                "gemma4", text_config={"num_hidden_layers": 6, "num_kv_shared_layers": 6}, vision_config=None
            ),
            "layer 0 uses keys .* num_kv_shared_layers in config.json is too large",
        ),
        (
            "a copy that there is not",
            AutoConfig.for_model(
                "gemma3n_text", num_hidden_layers=5, num_kv_shared_layers=0, altup_active_idx=4
            ),
            "altup_active_idx is 4, which must be at least 0 and below altup_num_inputs, which is 4",
        ),
        (
            "heads without numbers",
            AutoConfig.for_model("gemma3n_text", num_hidden_layers=12, num_kv_shared_layers=6, head_dim=0),
            "config.json of the base model cannot be used: ZeroDivisionError",
        ),
        ("another tower", AutoConfig.for_model("paligemma"), "paligemma is not supported"),
        ("a model that looks ahead", tiny("gemma3_text", use_bidirectional_attention=True), "bidirectional"),
    ],
)
def test_what_would_be_computed_wrong_is_refused_by_name(story: str, config: Any, told: str) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        meta_model(config, torch.float32)
    assert re.search(told, str(caught.value)), story


@pytest.mark.parametrize(
    ("story", "model_type", "family", "told"),
    [
        ("an encoder and a decoder", "t5", Family(), "t5 is not a causal language model"),
        (
            "other names",
            "gpt2",
            Family(),
            "GPT2LMHeadModel .* no embed_tokens, no rotary_emb, no layers, no norm",
        ),
        ("another norm", "phi", Family(), "its decoder has no norm"),
        ("what the family calls layers is none", "llama", Family(layers="norm"), "no list of decoder layers"),
    ],
)
def test_a_model_that_is_built_otherwise_than_its_family_is_refused_by_what_it_lacks(
    story: str, model_type: str, family: Family, told: str
) -> None:
    """Whatever the list of types says: it is looked at, too."""
    config = AutoConfig.for_model("t5") if model_type == "t5" else tiny(model_type)
    with pytest.raises(UnsupportedModel) as caught:
        meta_model(config, torch.float32, family)
    assert re.search(told, str(caught.value)), story


def test_linear_modules_of_gpt2_are_told_as_any_others(small_model: Any) -> None:
    architecture = read_architecture(small_model("gpt2", n_inner=48).folder)
    shapes = {one.path: (one.in_features, one.out_features) for one in architecture.linears if one.layer == 1}
    assert shapes == {
        "transformer.h.1.attn.c_attn": (32, 96),
        "transformer.h.1.attn.c_proj": (32, 32),
        "transformer.h.1.mlp.c_fc": (32, 48),
        "transformer.h.1.mlp.c_proj": (48, 32),
    }
    assert architecture.transposed
    assert (architecture.intermediate_size, architecture.max_positions) == (48, 64)
    assert read_architecture(small_model("gpt2").folder).intermediate_size == 4 * 32, "its default"
