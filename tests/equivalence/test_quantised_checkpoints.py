"""Checkpoints that transformers has quantised load as they are, and adapters from quantised bases load in PEFT."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, FineGrainedFP8Config

from bench.base import whole_stage
from mlora_worker.frozen.four_bits import nf4
from mlora_worker.frozen.fp8 import scales_of
from mlora_worker.frozen.quantised import QuantisedWeight
from mlora_worker.model.stage import Stage
from mlora_worker.protocol import LoRAConfig, Training
from mlora_worker.storage.artifacts.adapter import CONFIG_NAME, adapter_config, save_weights
from tests.equivalence.tasks import Base, Row, Task, tiny_llama, train

FOUR = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
EIGHT = BitsAndBytesConfig(load_in_8bit=True)
BLOCK = (128, 128)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Base:
    """Its rows and columns are whole blocks, as transformers asks for."""
    base = tiny_llama(tmp_path_factory.mktemp("plain"), tied=True, hidden_size=256, intermediate_size=384)
    base.model.save_pretrained(base.folder)
    return base


def loaded(folder: Path, quantisation: Any = None) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=quantisation, dtype=torch.float32, device_map="cpu"
    )


def matrices(stage: Stage) -> dict[str, Tensor]:
    assert all(isinstance(one.weight, QuantisedWeight) for one in stage.linears.values())
    return {path: one.weight.dense(torch.float32) for path, one in stage.linears.items()}


def test_four_bits_of_transformers_are_those_that_we_would_make(plain: Base, tmp_path: Path) -> None:
    loaded(plain.folder, FOUR).save_pretrained(tmp_path)
    found = matrices(whole_stage(tmp_path, torch.float32))
    for path, value in found.items():
        matrix = plain.model.get_submodule(path).weight.detach()
        assert torch.equal(value, nf4(matrix, double=True).dense(torch.float32)), path


def test_eight_bits_of_transformers_have_its_values(plain: Base, tmp_path: Path) -> None:
    loaded(plain.folder, EIGHT).save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    found = matrices(whole_stage(tmp_path, torch.float32))
    for path, value in found.items():
        wanted = stored[f"{path}.weight"].float() * stored[f"{path}.SCB"][:, None] / 127
        torch.testing.assert_close(value, wanted, rtol=1e-6, atol=1e-8)
        matrix = plain.model.get_submodule(path).weight.detach()
        assert (value - matrix).norm() < 0.02 * matrix.norm()


@pytest.mark.parametrize("block", [BLOCK, None, "channel"], ids=["by block", "by tensor", "by channel"])
def test_fp8_has_the_values_that_transformers_makes_of_it(
    plain: Base, tmp_path: Path, block: tuple[int, int] | str | None
) -> None:
    tensors: dict[str, Tensor] = {}
    for name, matrix in load_file(plain.folder / "model.safetensors").items():
        if not isinstance(plain.model.get_submodule(name.removesuffix(".weight")), nn.Linear):
            tensors[name] = matrix
            continue
        if isinstance(block, tuple):
            scales = torch.rand(scales_of((matrix.shape[0], matrix.shape[1]), block)) / 100
            wide = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        else:
            scales = wide = torch.rand(() if block is None else (len(matrix), 1)) / 100
        tensors[f"{name}_scale_inv"] = scales
        tensors[name] = (matrix / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    said: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": None}
    if isinstance(block, tuple):
        said["weight_block_size"] = list(block)
    config = json.loads((plain.folder / "config.json").read_text()) | {"quantization_config": said}
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = loaded(
        tmp_path, FineGrainedFP8Config(dequantize=True, weight_block_size=said["weight_block_size"])
    )
    found = matrices(whole_stage(tmp_path, torch.float32))
    for path, value in found.items():
        torch.testing.assert_close(value, theirs.get_submodule(path).weight.detach(), rtol=1e-6, atol=1e-8)


def test_an_adapter_from_a_quantised_base_loads_on_it_and_on_the_plain_one(
    plain: Base, tmp_path: Path, rows: Callable[..., list[Row]]
) -> None:
    lora = LoRAConfig(rank=4, alpha=8, target_modules=("all-linear",))
    task = Task("t", lora, Training(batch_size=2, learning_rate=1e-2, seed=1), rows(6, 1), 10)
    trained = train(plain, 1, [task], freeze=partial(nf4, double=True))["t"]
    names = sorted({name.split(".")[-3] for name in trained.adapter})
    save_weights(trained.adapter, tmp_path)
    (tmp_path / CONFIG_NAME).write_text(json.dumps(adapter_config(lora, "tiny", None, names)))
    tokens = torch.arange(12)[None]
    for base in (loaded(plain.folder), loaded(plain.folder, FOUR)):
        for module in base.modules():  # in eval mode it would multiply in bfloat16 on some processors
            if hasattr(module, "support_avx512bf16_for_cpu"):
                module.support_avx512bf16_for_cpu = False
        without = base(tokens).logits
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # PEFT warns of missing and of unexpected keys
            model = PeftModel.from_pretrained(base, tmp_path)
        assert (model(tokens).logits - without).norm() > 0.05 * without.norm()
