"""A stage reads its own tensors and no others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mlora_worker.model.errors import IncompleteModel
from mlora_worker.model.load import load_stage

CPU = torch.device("cpu")


def test_the_stages_together_read_every_tensor_once(small_model: Any) -> None:
    saved = small_model("llama", tie_word_embeddings=False)
    for stage in range(3):
        load_stage(saved.folder, saved, stage, 3, torch.float32, CPU)
    assert sorted(saved.read) == sorted(saved.names())


def test_a_middle_stage_reads_its_layers_only(small_model: Any) -> None:
    saved = small_model("llama")
    stage = load_stage(saved.folder, saved, 1, 3, torch.float32, CPU)
    assert all(name.startswith("model.layers.1.") for name in saved.read)
    assert stage.embedding is None
    assert stage.norm is None
    assert stage.head_weight is None


def test_a_tied_head_is_the_embedding_on_one_stage_and_read_again_on_two(small_model: Any) -> None:
    saved = small_model("llama", tie_word_embeddings=True)
    one = load_stage(saved.folder, saved, 0, 1, torch.float32, CPU)
    assert one.head_weight is not None
    assert one.embedding is not None
    assert one.head_weight.data_ptr() == one.embedding.weight.data_ptr()
    last = load_stage(saved.folder, saved, 1, 2, torch.float32, CPU)
    torch.testing.assert_close(last.head_weight, saved.tensor("model.embed_tokens.weight"), rtol=0, atol=0)
    parameters = sum(saved.tensor(name).nbytes for name in saved.names())
    assert parameters <= one.resident_bytes < parameters + 1000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_have_the_asked_type_and_frequencies_stay_float32(
    small_model: Any, dtype: torch.dtype
) -> None:
    saved = small_model("llama")
    stage = load_stage(saved.folder, saved, 0, 1, dtype, CPU)
    tensors = [*stage.layers.parameters(), stage.head_weight, stage.embedding.weight]
    assert {tensor.dtype for tensor in tensors} == {dtype}
    assert not any(tensor.requires_grad for tensor in tensors)
    assert not stage.layers.training
    torch.testing.assert_close(stage.rotary.inv_freq, saved.model.model.rotary_emb.inv_freq, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["model.layers.2.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"])
def test_a_missing_tensor_is_named(small_model: Any, name: str) -> None:
    saved = small_model("llama", tie_word_embeddings=False)
    saved.hidden = frozenset({name})
    with pytest.raises(IncompleteModel, match=name):
        load_stage(saved.folder, saved, 1, 2, torch.float32, CPU)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(small_model: Any) -> None:
    saved = small_model("llama", vocab_size=98)
    small_model("llama", vocab_size=97)
    with pytest.raises(IncompleteModel, match=r"embed_tokens.weight has shape \[98, 32\].*\[97, 32\]"):
        load_stage(saved.folder, saved, 0, 2, torch.float32, CPU)
