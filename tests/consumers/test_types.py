"""vLLM writes what PEFT writes, with adapters of types whose layers, names or towers are not those of most."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.consumers.offline import in_vllm, small_base, trained

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]

# Windows are shorter than prompt and answer, so that they matter.
GEMMA3: dict[str, Any] = {
    "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2, "query_pre_attn_scalar": 64,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
    },
}  # fmt: skip
TEXT_ALONE: dict[str, dict[str, Any]] = {
    "gemma3_text": GEMMA3,
    "lfm2": {
        "layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3, "block_auto_adjust_ff_dim": False,
        "conv_dim": 128, "block_dim": 128,  # which vLLM reads, and published configurations have
        "tie_word_embeddings": True,
    },
}  # fmt: skip
WITH_TOWERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        GEMMA3,
        {
            "vision_config": {
                "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
                "image_size": 28, "patch_size": 14,
            },
            "mm_tokens_per_image": 4,
        },
    ),
    "qwen2_vl": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]}},
        {
            "vision_config": {"hidden_size": 128, "embed_dim": 64, "depth": 1, "num_heads": 2, "mlp_ratio": 2},
            "image_token_id": 10, "video_token_id": 11, "vision_start_token_id": 12, "vision_end_token_id": 13,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("model_type", TEXT_ALONE)
def test_an_adapter_writes_in_vllm_what_it_writes_in_peft(
    model_type: str, smollm2: Path, tmp_path: Path
) -> None:
    base = small_base(tmp_path / "model", smollm2, model_type, TEXT_ALONE[model_type])
    adapters = [None, trained(base, all_linear={})["all_linear"]]
    expected = [base.by_peft(one) for one in adapters]
    assert base.by_vllm(adapters) == expected
    assert expected[0] != expected[1]


@pytest.mark.parametrize("model_type", WITH_TOWERS)
def test_an_adapter_of_a_text_part_writes_in_vllm_what_it_writes_in_peft(
    model_type: str, smollm2: Path, tmp_path: Path
) -> None:
    text, towers = WITH_TOWERS[model_type]
    base = small_base(tmp_path / "model", smollm2, model_type, text, **towers)
    in_vllm("processor.py", model_type, str(base.folder))
    adapters = [None, trained(base, text_part={})["text_part"]]
    expected = [base.by_peft(one) for one in adapters]
    assert base.by_vllm(adapters, limit_mm_per_prompt={"image": 0}) == expected
    assert expected[0] != expected[1]
