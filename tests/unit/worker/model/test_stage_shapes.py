"""What a stage will hold is known before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from mlora_worker.frozen.onednn import OneDnnWeight, available
from mlora_worker.model.architecture import read_architecture
from mlora_worker.model.facts import model_facts, stage_shapes
from mlora_worker.model.load import load_stage
from mlora_worker.model.quantisation import freeze_of
from mlora_worker.protocol import Quantization
from mlora_worker.stream.costs import head_cost, stage_costs
from mlora_worker.stream.footprint import dense_numbers
from mlora_worker.stream.libraries import KERNEL_BYTES
from tests.fixtures.model_options import FAMILY, VARIANTS


@pytest.mark.parametrize(
    "model_type",
    [
        "llama",
        "phi3",
        "gemma2",
        "gemma3_text",
        "gemma3",
        "qwen3_vl",
        "qwen3_5",
        "lfm2",
        "gpt_neox",
        "gpt2",
        "deepseek_v3",
        "glm4_moe",
        "gpt_oss",
        "granitemoe",
        "mixtral",
        "olmoe",
        "qwen3_moe",
        "qwen3_next",
        "qwen3_5_moe",
        "qwen3_vl_moe",
        "granitemoehybrid",
        "lfm2_moe",
        "gemma4_text of experts",
        "gemma3n_text",
        "gemma4_text, keys shared",
        "gemma4_text, inputs of layers alone",
        "hunyuan_v1_moe",
        "minimax_m2",
        "ernie4_5_moe",
        "afmoe",
        "falcon_h1",
        "phi",
        "phimoe",
        "llama4",
        "llama4_text",
    ],
)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_the_bytes_are_those_that_a_loaded_stage_measures(
    small_model: Any, model_type: str, tied: bool
) -> None:
    model_type, options = VARIANTS.get(model_type, (model_type, FAMILY.get(model_type, {})))
    saved = small_model(model_type, **({"num_hidden_layers": 4} | options | {"tie_word_embeddings": tied}))
    for stages in (1, 3):  # one that is all, and a first, an inner and a last
        shapes = stage_shapes(saved.folder, stages, torch.bfloat16)
        assert [shape.stage for shape in shapes] == list(range(stages))
        for shape in shapes:
            loaded = load_stage(saved.folder, saved, shape.stage, stages, torch.bfloat16, torch.device("cpu"))
            assert shape.resident_bytes == loaded.resident_bytes
            assert shape.parameters == loaded.parameters
            assert range(shape.first_layer, shape.last_layer + 1) == loaded.layer_range


@pytest.mark.skipif(not available(torch.float32), reason="this build of torch has no oneDNN")
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_weights_of_another_library_take_its_kernels_more(small_model: Any, tied: bool) -> None:
    saved = small_model(
        "llama", hidden_size=256, head_dim=64, intermediate_size=512, vocab_size=128, tie_word_embeddings=tied
    )
    for stages in (1, 2):
        for shape in stage_shapes(saved.folder, stages, torch.float32):
            loaded = load_stage(
                saved.folder, saved, shape.stage, stages, torch.float32, torch.device("cpu"),
                OneDnnWeight, OneDnnWeight,
            )  # fmt: skip
            assert loaded.resident_bytes == shape.resident_bytes + KERNEL_BYTES
            assert shape.parameters == loaded.parameters
            assert loaded.products == "oneDNN"


@pytest.mark.parametrize(
    "asked",
    [
        Quantization(type="nf4"),
        Quantization(type="nf4", double_quantization=False),
        Quantization(type="int8"),
    ],
)
@pytest.mark.parametrize(
    "model_type",
    [
        "llama",
        "gpt2",
        "gemma3",
        "lfm2",
        "qwen3_5",
        "qwen3_moe",
        "gemma4_text of experts",
        "gemma3n_text",
        "gemma4_text, keys shared",
        "llama4_text",
    ],
)
def test_so_are_the_bytes_of_a_quantised_stage(
    small_model: Any, asked: Quantization, model_type: str
) -> None:
    model_type, options = VARIANTS.get(model_type, (model_type, FAMILY.get(model_type, {})))
    saved = small_model(model_type, **({"num_hidden_layers": 4} | options))
    freeze = freeze_of(asked)
    assert freeze is not None
    for shape in stage_shapes(saved.folder, 2, torch.bfloat16, asked):
        loaded = load_stage(saved.folder, saved, shape.stage, 2, torch.bfloat16, torch.device("cpu"), freeze)
        assert shape.resident_bytes == loaded.resident_bytes
        assert shape.parameters == loaded.parameters
        plain = stage_shapes(saved.folder, 2, torch.bfloat16)[shape.stage]
        assert shape.resident_bytes < plain.resident_bytes


def test_a_tied_head_counts_once_on_one_stage_and_twice_on_two(small_model: Any) -> None:
    """The last stage has no embedding to share: it reads the weight again, and its memory must be planned for."""
    saved = small_model("llama", tie_word_embeddings=True)
    once = sum(shape.parameters for shape in stage_shapes(saved.folder, 1, torch.float32))
    twice = sum(shape.parameters for shape in stage_shapes(saved.folder, 2, torch.float32))
    assert once == sum(parameter.numel() for parameter in saved.model.parameters())
    assert twice - once == saved.model.config.vocab_size * saved.model.config.hidden_size


def test_published_mixtures_have_the_parameters_that_their_authors_tell(tmp_path: Path) -> None:
    """And a token goes through a few of them alone: that is what stages are cut by."""
    shapes = {
        "qwen3_moe": (
            {
                "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
                "head_dim": 128, "intermediate_size": 6144, "num_experts": 128, "num_experts_per_tok": 8,
                "moe_intermediate_size": 768, "vocab_size": 151936, "tie_word_embeddings": False,
            },
            30_532_122_624, 3.3e9,
        ),
        "mixtral": (
            {
                "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
                "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000,
                "tie_word_embeddings": False,
            },
            46_702_792_704, 12.9e9,
        ),
        "llama4_text": (  # Scout, of whose 109 billion some are in its tower
            {
                "hidden_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8,
                "head_dim": 128, "intermediate_size": 8192, "intermediate_size_mlp": 16384, "num_local_experts": 16,
                "num_experts_per_tok": 1, "vocab_size": 202048, "tie_word_embeddings": False,
            },
            107_769_861_120, 17e9,
        ),
    }  # fmt: skip
    for model_type, (options, parameters, active) in shapes.items():
        AutoConfig.for_model(model_type, **options).save_pretrained(tmp_path)
        found = stage_shapes(tmp_path, 4, torch.bfloat16)
        assert sum(shape.parameters for shape in found) == parameters
        assert sum(shape.resident_bytes for shape in found) == pytest.approx(2 * parameters, rel=1e-6)
        quarter = stage_shapes(tmp_path, 4, torch.bfloat16, Quantization(type="nf4"))
        assert sum(shape.resident_bytes for shape in quarter) < 0.6 * parameters
        facts = model_facts(tmp_path, 4, torch.bfloat16)
        layers = sum(read_architecture(tmp_path).layer_costs())
        ends = options["vocab_size"] * options["hidden_size"]
        assert layers + 2 * ends == pytest.approx(active, rel=0.02)
        ours = sum(cost.per_token for cost in stage_costs(facts, 4, 0.0))
        assert ours == layers + facts.hidden_size + head_cost(facts.hidden_size, facts.vocab_size)
        largest = facts.hidden_size * (facts.experts or ())[0].width
        assert dense_numbers(facts, 0, [["q_proj"], ["k_proj"], ["v_proj"], ["o_proj"]]) >= largest
