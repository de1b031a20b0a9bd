"""Adapters on routed experts in vLLM, as ``mlora sync`` has them loaded: PEFT's tokens, or a refusal.

vLLM computes experts with adapters on GPUs alone, so that one product is this project's reference here
(``in_vllm/experts_in_torch.py``). Which adapters vLLM accepts, and what it makes of their files, is its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlora_operator.sync.needs import RENAMED_IN_VLLM, needs_of, vllm_lacks
from tests.consumers.offline import SmallBase, small_base, trained

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]

BOTH = ["experts.gate_up_proj", "experts.down_proj"]
ALONE = {"targetModules": [], "targetParameters": BOTH}
FIGURES = {
    "targetModules": ["q_proj"], "targetParameters": BOTH, "useRslora": True, "rankPattern": {"gate_up_proj": 4},
    "alphaPattern": {r".*experts\.down_proj": 9.0},
}  # fmt: skip
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64, "sliding_window": None},
    "gpt_oss": {
        "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64, "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256,
            "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        },
    },
}  # fmt: skip
OF_THREE_DIMENSIONS = {"gpt_oss"}


def mixture(model_type: str, smollm2: Path, folder: Path) -> SmallBase:
    return small_base(folder / "model", smollm2, model_type, MIXTURES[model_type])


@pytest.mark.parametrize("model_type", sorted(MIXTURES.keys() - RENAMED_IN_VLLM))
def test_an_adapter_on_experts_writes_in_vllm_what_it_writes_in_peft(
    model_type: str, smollm2: Path, tmp_path: Path
) -> None:
    base = mixture(model_type, smollm2, tmp_path)
    made = list(trained(base, alone=ALONE, figures=FIGURES).values())
    assert all(needs_of(folder).stacked for folder in made)
    expected = [base.by_peft(one) for one in (None, *made)]
    assert base.by_vllm([None, *made], experts_in_torch=True, enable_mixed_moe_lora_format=True) == expected
    assert len({tuple(one) for one in expected}) == 3

    if model_type in OF_THREE_DIMENSIONS:
        assert base.by_vllm([None, *made], experts_in_torch=True) == expected
        return
    plain = [base.plain(one) for one in made]
    of_base, alone, figures, *of_plain = base.by_vllm([None, *made, *plain], experts_in_torch=True)
    assert [of_base, *of_plain] == expected
    for one in (alone, figures):  # what `mlora sync` then reports
        assert "--enable-mixed-moe-lora-format" in one["refused"]


@pytest.mark.parametrize("model_type", sorted(MIXTURES.keys() & RENAMED_IN_VLLM))
def test_experts_that_vllm_would_leave_out_are_kept_from_it_and_it_has_them_plain(
    model_type: str, smollm2: Path, tmp_path: Path
) -> None:
    base = mixture(model_type, smollm2, tmp_path)
    adapter = trained(base, alone=ALONE)["alone"]
    assert f"the experts of {model_type}" in str(vllm_lacks(needs_of(adapter), lambda: "0.32.0"))
    asked = [None, adapter, base.plain(adapter)]
    of_base, left_out, plain = base.by_vllm(asked, experts_in_torch=True, enable_mixed_moe_lora_format=True)
    assert of_base == left_out == base.by_peft(None)
    assert plain == base.by_peft(adapter) != of_base
