"""Which models are supported, and which are refused. That each is computed as transformers does: tests/equivalence."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from mlora_worker.model.architecture import meta_model, read_architecture, read_config
from mlora_worker.model.errors import UnsupportedModel


def test_the_shape_is_read_from_the_configuration_alone(small_model: Any) -> None:
    architecture = read_architecture(small_model("llama").folder)
    assert (architecture.layers, architecture.hidden_size, architecture.max_positions) == (3, 32, 64)
    assert len(architecture.linears) == 21
    assert architecture.linears[1].path == "model.layers.0.self_attn.k_proj"
    assert architecture.linears[1].name == "k_proj"
    assert architecture.layer_costs() == [32 * 32 * 2 + 32 * 16 * 2 + 32 * 48 * 3] * 3


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model_type": "gemma"}, "model type gemma is not supported; supported are arcee, llama"),
        ({"model_type": "no-such-model"}, "no-such-model"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantized"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
            "rope type dynamic",
        ),
    ],
)
def test_what_would_be_computed_wrong_is_refused(small_model: Any, change: dict[str, Any], told: str) -> None:
    folder = small_model("llama").folder
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UnsupportedModel, match=told):
        read_config(folder)


@pytest.mark.parametrize(
    ("story", "model_type", "options", "told"),
    [
        (
            "a decoder without a list of layers",
            "gpt2",
            {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 9},
            "GPT2LMHeadModel .* no embed_tokens, no layers, no norm, no rotary_emb",
        ),
        ("an encoder and a decoder", "t5", {}, "t5 is no causal language model"),
        (
            "a final norm of another name",
            "phi",
            {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "vocab_size": 9,
            },
            "its decoder has no norm",
        ),
    ],
)
def test_a_model_that_is_built_otherwise_is_refused_by_what_it_lacks(
    story: str, model_type: str, options: dict[str, int], told: str
) -> None:
    """Whatever the list of types says: it is looked at too."""
    config = AutoConfig.for_model(model_type, **options)
    with pytest.raises(UnsupportedModel) as caught:
        meta_model(config, torch.float32)
    assert re.search(told, str(caught.value)), story
