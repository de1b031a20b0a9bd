"""Bases with routed experts: what is published of them is read, and neighbours and PEFT are as elsewhere.

That each type computes what transformers does, and trains as PEFT does, is in the tests of all types.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.base import whole_stage
from mlora_worker.frozen.plain import PlainWeight
from mlora_worker.model.load import load_stage
from tests.equivalence.mixtures import CPU, IDS, TRAINING, logits, lora, wider
from tests.equivalence.tasks import Row, Task, assert_same, largest_difference, train
from tests.fixtures.model_options import EXPERT_TYPES, FAMILY, VARIANTS


def stored(folder: Path) -> list[str]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return list(file.keys())


# Of one layer's experts, in files that are published.
STORED = dict.fromkeys(EXPERT_TYPES, "mlp.experts.5.up_proj.weight") | {
    "deepseek_v3": "mlp.experts.7.up_proj.weight",
    "gpt_oss": "mlp.experts.gate_up_proj_bias",
    "granitemoe": "block_sparse_moe.input_linear.weight",
    "granitemoehybrid": "block_sparse_moe.input_linear.weight",
    "granitemoeshared": "block_sparse_moe.input_linear.weight",
    "lfm2_moe": "feed_forward.experts.5.w3.weight",
    "llama4_text": "feed_forward.experts.gate_up_proj",
    "minimax_m2": "block_sparse_moe.experts.5.w3.weight",
    "mixtral": "block_sparse_moe.experts.5.w3.weight",
    "phimoe": "block_sparse_moe.experts.5.w3.weight",
}


@pytest.mark.parametrize("model_type", EXPERT_TYPES)
def test_a_folder_in_the_published_form_is_read(small_model: Any, tmp_path: Path, model_type: str) -> None:
    saved = small_model(model_type, **FAMILY[model_type])
    saved.model.save_pretrained(tmp_path)
    assert f"model.layers.2.{STORED[model_type]}" in stored(tmp_path)
    wanted = saved.model(input_ids=IDS[None]).logits[0]
    torch.testing.assert_close(logits(whole_stage(tmp_path, torch.float32)), wanted, rtol=1e-5, atol=1e-5)


class Published:
    """The tensors of a folder; remembers which were read."""

    def __init__(self, folder: Path) -> None:
        self._file: Any = safe_open(folder / "model.safetensors", framework="pt")
        self.read = list[str]()

    def names(self) -> list[str]:
        return list(self._file.keys())

    def tensor(self, name: str) -> Tensor:
        self.read.append(name)
        tensor: Tensor = self._file.get_tensor(name)
        return tensor


@pytest.mark.parametrize("model_type", EXPERT_TYPES)
def test_each_stage_reads_its_own_experts_once(small_model: Any, tmp_path: Path, model_type: str) -> None:
    small_model(model_type, **FAMILY[model_type]).model.save_pretrained(tmp_path)
    source = Published(tmp_path)
    for stage in range(3):
        before = len(source.read)
        load_stage(tmp_path, source, stage, 3, torch.bfloat16, CPU)
        own = [name for name in source.read[before:] if ".layers." in name]
        assert all(name.startswith(f"model.layers.{stage}.") for name in own)
    assert sorted(source.read) == sorted(source.names())


def test_a_tensor_of_one_expert_that_is_not_known_is_refused(small_model: Any, tmp_path: Path) -> None:
    small_model("qwen3_moe", **FAMILY["qwen3_moe"]).model.save_pretrained(tmp_path)

    class Biased(Published):
        def names(self) -> list[str]:
            return [*super().names(), "model.layers.2.mlp.experts.0.up_proj.bias"]

    with pytest.raises(ValueError, match=r"layers\.2\.mlp\.experts\.0\.up_proj\.bias"):
        load_stage(tmp_path, Biased(tmp_path), 0, 1, torch.float32, CPU)


@pytest.mark.parametrize(
    ("model_type", "recompute"),
    [
        ("qwen3_moe", False),
        ("qwen3_moe", True),
        ("qwen3_next", False),
        ("granitemoehybrid", False),
        ("gpt_oss", False),
        ("phimoe", False),
        ("afmoe", False),
        ("llama4_text", False),
    ],
)
def test_a_task_has_the_bits_of_itself_alone_beside_any_neighbour(
    small_model: Any, rows: Callable[..., list[Row]], model_type: str, recompute: bool
) -> None:
    """Tokens of both go through the same experts in the same microbatches, and some through layers with a state."""
    base = wider(small_model, model_type)
    own = Task("own", lora(model_type, dropout=0.1), TRAINING, rows(11, 1, vocabulary=97), 6)
    others = [
        Task(f"other-{n}", lora(model_type, rank=n + 1), TRAINING, rows(5 + n, n + 2, vocabulary=97), 6)
        for n in range(2)
    ]
    alone = train(base, 1, [own], recompute=recompute)["own"]
    for company in ([others[0], own], [own, others[1]], [others[1], own, others[0]]):
        beside = train(base, 1, company, recompute=recompute)["own"]
        assert beside.microbatches == alone.microbatches
        assert beside.losses == alone.losses
        assert largest_difference(beside.adapter, alone.adapter) == 0.0
    in_parts = train(base, 2, [others[0], own, others[1]], recompute=recompute)["own"]
    assert_same(in_parts, alone, losses=1e-6, weights=1e-5)


def test_plain_experts_are_not_held_twice(small_model: Any) -> None:
    saved = small_model("olmoe", **FAMILY["olmoe"])
    stage = load_stage(saved.folder, saved, 0, 1, torch.float32, CPU, PlainWeight)
    own = sum(parameter.nbytes for parameter in saved.model.parameters())
    assert own <= stage.resident_bytes < own + 1000


@pytest.mark.parametrize("kind", ["nemotron_h", "nemotron_h of experts"])
def test_the_decoder_has_another_name_in_nemotrons_files(small_model: Any, tmp_path: Path, kind: str) -> None:
    model_type, options = VARIANTS.get(kind, (kind, FAMILY.get(kind, {})))
    saved = small_model(model_type, num_hidden_layers=4, **options)
    saved.model.save_pretrained(tmp_path / "new")
    former = {
        name.replace("model.", "backbone.") if name.startswith("model.") else name: tensor
        for name, tensor in load_file(tmp_path / "new" / "model.safetensors").items()
    }
    assert "backbone.embeddings.weight" in former
    assert ("backbone.layers.3.mixer.experts.5.up_proj.weight" in former) == (kind != model_type)
    save_file(former, tmp_path / "model.safetensors")
    wanted = saved.model(input_ids=IDS[None]).logits[0]
    for folder in (tmp_path, tmp_path / "new"):
        torch.testing.assert_close(logits(whole_stage(folder, torch.float32)), wanted, rtol=1e-5, atol=1e-5)
