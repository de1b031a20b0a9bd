"""A stage reads its own tensors and no others."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch

from mlora_worker.model.attention import PackedRows
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
    assert one.head_weight.dense(torch.float32).data_ptr() == one.embedding.weight.data_ptr()
    last = load_stage(saved.folder, saved, 1, 2, torch.float32, CPU)
    torch.testing.assert_close(
        last.head_weight.dense(torch.float32), saved.tensor("model.embed_tokens.weight"), rtol=0, atol=0
    )
    parameters = sum(saved.tensor(name).nbytes for name in saved.names())
    assert parameters <= one.resident_bytes < parameters + 1000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_have_the_asked_type_and_frequencies_stay_float32(
    small_model: Any, dtype: torch.dtype
) -> None:
    saved = small_model("llama")
    stage = load_stage(saved.folder, saved, 0, 1, dtype, CPU)
    tensors = [*stage.layers.parameters(), *stage.head_weight.parameters(), stage.embedding.weight]
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


def renamed(saved: Any, change: Callable[[str], str]) -> Any:
    """The same model whose files have other names for its tensors."""
    stored = {change(name): name for name in saved.names()}

    class Source:
        def names(self) -> Collection[str]:
            return stored

        def tensor(self, name: str) -> torch.Tensor:
            tensor: torch.Tensor = saved.tensor(stored[name])
            return tensor

    return Source()


@pytest.mark.parametrize(
    ("story", "model_type", "change"),
    [
        ("files of the bare decoder", "gpt2", lambda name: name.removeprefix("transformer.")),
        ("the head's older name", "gpt_neox", lambda name: name.replace("lm_head.", "embed_out.")),
    ],
)
def test_names_that_published_files_have_are_found(
    small_model: Any, story: str, model_type: str, change: Callable[[str], str]
) -> None:
    saved = small_model(model_type)
    assert set(renamed(saved, change).names()) != set(saved.names())
    usual = load_stage(saved.folder, saved, 0, 1, torch.float32, CPU)
    other = load_stage(saved.folder, renamed(saved, change), 0, 1, torch.float32, CPU)
    for one, two in zip(usual.layers.parameters(), other.layers.parameters(), strict=True):
        assert torch.equal(one, two), story
    assert torch.equal(usual.head_weight.dense(torch.float32), other.head_weight.dense(torch.float32))


def test_a_weight_that_files_have_transposed_is_turned_and_its_shape_is_checked(small_model: Any) -> None:
    saved = small_model("gpt2", n_inner=48)
    stage = load_stage(saved.folder, saved, 0, 1, torch.float32, CPU)
    weight = stage.linears["transformer.h.0.mlp.c_fc"].weight.dense(torch.float32)
    assert weight.shape == (48, 32)
    assert weight.is_contiguous()
    assert torch.equal(weight.T, saved.tensor("transformer.h.0.mlp.c_fc.weight"))
    small_model("gpt2", n_inner=40)
    with pytest.raises(IncompleteModel, match=r"c_fc.weight has shape \[32, 48\].*\[32, 40\]"):
        load_stage(saved.folder, saved, 0, 1, torch.float32, CPU)


def test_a_scale_of_the_embedding_is_set_by_the_model_itself(small_model: Any) -> None:
    """It is in no file. In half precision it is rounded as transformers rounds it."""
    saved = small_model("gemma2")
    stage = load_stage(saved.folder, saved, 0, 1, torch.bfloat16, CPU)
    rows, ids = PackedRows((3,), CPU), torch.tensor([5, 6, 7])
    wanted = saved.model.to(torch.bfloat16).model.embed_tokens(ids)
    assert torch.equal(stage.embed(ids, rows), wanted)
    assert stage.embedding is not None
    assert not torch.equal(wanted, stage.embedding.weight[ids])
