"""Tensors in a model's files that its configuration has no place for: what transformers computes, or a refusal by name."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from mlora_worker.model.attention import PackedRows
from mlora_worker.model.errors import UnsupportedModel
from mlora_worker.model.load import load_stage
from tests.fixtures.model_options import VARIANTS

CPU = torch.device("cpu")
ROW = torch.tensor([5, 17, 3, 80, 11])


class Files:
    """A folder's tensors, as they are stored."""

    def __init__(self, folder: Path) -> None:
        self.tensors = load_file(folder / "model.safetensors")

    def names(self) -> Collection[str]:
        return set(self.tensors)

    def tensor(self, name: str) -> Tensor:
        return self.tensors[name]


def stored(saved: Any, **changed: Tensor | None) -> Files:
    """The model's files with some tensors added, or (None) taken away. Names have __ for their dots."""
    saved.model.save_pretrained(saved.folder)
    file = saved.folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    for name, tensor in changed.items():
        plain = name.replace("__", ".")
        if tensor is None:
            del tensors[plain]
        else:
            tensors[plain] = tensor
    save_file(tensors, file, {"format": "pt"})
    return Files(saved.folder)


def logits(files: Files, folder: Path, stages: int) -> Tensor:
    rows, hidden = PackedRows((len(ROW),), CPU), torch.empty(0)
    for index in range(stages):
        stage = load_stage(folder, files, index, stages, torch.float32, CPU)
        hidden = stage.run_layers(stage.embed(ROW, rows) if stage.first else hidden, rows)
    return stage.logits(hidden)


def theirs(folder: Path) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        result: Tensor = model(ROW[None]).logits[0]
        return result


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2"])
def test_a_head_that_the_files_have_wins_over_a_configuration_that_ties_it(
    small_model: Any, kind: str, stages: int
) -> None:
    saved = small_model(kind, tie_word_embeddings=True)
    size = saved.model.get_output_embeddings().weight.shape
    files = stored(saved, lm_head__weight=torch.randn(size))
    torch.testing.assert_close(
        logits(files, saved.folder, stages), theirs(saved.folder), rtol=1e-5, atol=1e-5
    )
    last = load_stage(saved.folder, files, stages - 1, stages, torch.float32, CPU)
    assert not last.architecture.tied_head


@pytest.mark.parametrize("stages", [1, 2])
def test_a_head_that_is_the_embedding_stays_tied(small_model: Any, stages: int) -> None:
    saved = small_model("llama", tie_word_embeddings=True)
    files = stored(saved, lm_head__weight=saved.model.model.embed_tokens.weight.detach().clone())
    torch.testing.assert_close(
        logits(files, saved.folder, stages), theirs(saved.folder), rtol=1e-5, atol=1e-5
    )
    last = load_stage(saved.folder, files, stages - 1, stages, torch.float32, CPU)
    assert last.architecture.tied_head
    if last.embedding is not None:
        assert last.head_weight is not None
        assert last.head_weight.dense(torch.float32).data_ptr() == last.embedding.weight.data_ptr()


@pytest.mark.parametrize("stages", [1, 2])
def test_files_with_the_head_alone_have_the_embedding_there(small_model: Any, stages: int) -> None:
    saved = small_model("llama", tie_word_embeddings=True)
    weight = saved.model.model.embed_tokens.weight.detach().clone()
    files = stored(saved, model__embed_tokens__weight=None, lm_head__weight=weight)
    torch.testing.assert_close(
        logits(files, saved.folder, stages), theirs(saved.folder), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.self_attn.q_proj.weight_scale",
        "model.layers.1.self_attn.q_proj.weight_scale_inv",
        "layers.1.mlp.up_proj.input_scale",
        "model.layers.0.mlp.down_proj.weight.absmax",
        "model.layers.0.self_attn.k_proj.qweight",
        "model.layers.2.self_attn.v_proj.bias",
        "model.norm.bias",
        "lm_head.weight_scale",
        "model.embed_tokens.scales",
    ],
)
@pytest.mark.parametrize("stage", [0, 1])
def test_what_would_make_another_weight_is_refused_by_name(small_model: Any, name: str, stage: int) -> None:
    saved = small_model("llama", tie_word_embeddings=False)
    files = stored(saved, **{name.replace(".", "__"): torch.ones(1)})
    with pytest.raises(UnsupportedModel, match=name.replace(".", r"\.")):
        load_stage(saved.folder, files, stage, 2, torch.float32, CPU)


def test_what_transformers_drops_without_harm_is_named_in_the_log(small_model: Any, caplog: Any) -> None:
    saved = small_model("llama")
    files = stored(
        saved,
        model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4),
        model__layers__7__mlp__up_proj__weight=torch.ones(2, 2),
        vision_tower__patch__weight=torch.ones(2),
    )
    torch.testing.assert_close(logits(files, saved.folder, 2), theirs(saved.folder), rtol=1e-5, atol=1e-5)
    (said,) = [one.message for one in caplog.records if one.name == "mlora_worker.model.load"]
    assert said.startswith(
        "3 stored tensors do not belong to a model of type llama and are ignored: model.layers.0."
    )


def test_keys_of_layers_that_use_those_of_others_are_dropped_without_a_word(
    small_model: Any, caplog: Any
) -> None:
    """Published files have them; nothing reads them, in transformers neither."""
    model_type, options = VARIANTS["gemma4_text, keys shared"]
    saved = small_model(model_type, **options)
    unused = {f"model__layers__2__self_attn__{name}__weight": torch.ones(2) for name in ("k_proj", "v_norm")}
    files = stored(saved, model__layers__9__self_attn__k_proj__weight=torch.ones(2), **unused)
    torch.testing.assert_close(logits(files, saved.folder, 2), theirs(saved.folder), rtol=1e-5, atol=1e-5)
    (said,) = [one.message for one in caplog.records if one.name == "mlora_worker.model.load"]
    assert said.startswith("1 stored tensors do not belong")
    assert "layers.9" in said
