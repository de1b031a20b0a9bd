"""Experts that are quantised, by a stage or as they are published, equal plain ones of the same values; so do adapters on
them.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.llama4.modeling_llama4 import Llama4Router, Llama4TextExperts

from bench.base import whole_stage
from mlora_worker.frozen.experts import FrozenExperts
from mlora_worker.frozen.fp8 import scales_of
from mlora_worker.frozen.int8 import int8
from mlora_worker.frozen.linear import Freeze
from mlora_worker.model.facts import stage_shapes
from mlora_worker.model.load import load_stage
from mlora_worker.protocol import LoRAConfig, Training
from tests.equivalence.mixtures import CPU, IDS, NF4, TRAINING, logits, lora, wider
from tests.equivalence.plain_peft import train_with_peft
from tests.equivalence.tasks import Base, Row, Task, Trained, assert_same, largest_difference, train
from tests.fixtures.model_options import FAMILY


def on_its_values(base: Base, freeze: Freeze, dtype: torch.dtype) -> Base:
    """The plain base whose matrices, those of experts with them, are those that a quantised one has."""
    model: Any = copy.deepcopy(base.model)
    for module in model.model.layers.modules():
        if isinstance(module, torch.nn.Linear) and not isinstance(module, Llama4Router):
            module.weight.data = freeze(module.weight.data.to(dtype)).dense(torch.float32)
        if hasattr(module, "gate_up_proj"):
            wide, narrow = module.gate_up_proj.data, module.down_proj.data
            if isinstance(module, Llama4TextExperts):  # [experts, in, out]
                wide, narrow = wide.transpose(1, 2), narrow.transpose(1, 2)
            width = wide.shape[1] // 2
            for stack in (wide[:, :width], wide[:, width:], narrow):
                for matrix in stack:
                    matrix.copy_(freeze(matrix.to(dtype).contiguous()).dense(torch.float32))
    return Base(base.folder, model)


def quantised_as_plain(
    base: Base, tasks: list[Task], freeze: Freeze, dtype: torch.dtype
) -> dict[str, Trained]:
    """Trained on the quantised base: with the bits of those on the plain base that has the same values."""
    found = train(base, 2, tasks, dtype=dtype, freeze=freeze)
    wanted = train(on_its_values(base, freeze, dtype), 2, tasks, dtype=dtype)
    for name, one in found.items():
        assert one.losses == wanted[name].losses
        assert largest_difference(one.adapter, wanted[name].adapter) == 0.0
    return found


@pytest.mark.parametrize("freeze", [NF4, int8], ids=["nf4", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model_type", ["qwen3_moe", "llama4_text"])
def test_quantised_experts_equal_plain_ones_with_the_same_values_bit_for_bit(
    small_model: Any, rows: Callable[..., list[Row]], freeze: Freeze, dtype: torch.dtype, model_type: str
) -> None:
    base = wider(small_model, model_type)
    tasks = [
        Task("a", lora(model_type), TRAINING, rows(7, 1, vocabulary=97), 4),
        Task("b", lora(model_type, rank=2), TRAINING, rows(5, 2, vocabulary=97), 4),
    ]
    found = quantised_as_plain(base, tasks, freeze, dtype)
    plain = train(base, 2, tasks[:1], dtype=dtype)["a"]
    assert plain.losses != found["a"].losses


def test_experts_are_kept_as_the_stage_asks(small_model: Any) -> None:
    saved = small_model("mixtral", **FAMILY["mixtral"])
    stage = load_stage(saved.folder, saved, 0, 1, torch.float32, CPU, int8)
    kinds = {
        type(weight).__name__
        for module in stage.layers.modules()
        if isinstance(module, FrozenExperts)
        for weight in (*module.gate, *module.up, *module.down)
    }
    assert kinds == {"Int8Weight"}


def packed_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors with random MXFP4 in the place of stacked experts."""
    generator, found = torch.Generator().manual_seed(0), dict[str, Tensor]()
    for name, tensor in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            found[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), generator=generator)
        found[f"{name}_blocks"] = blocks.to(torch.uint8)
        exponents = torch.randint(119, 125, (experts, outputs, inputs // 32), generator=generator)
        found[f"{name}_scales"] = exponents.to(torch.uint8)
    return found


@dataclass(frozen=True)
class InFiles(Base):
    """``tensors`` as files have them."""

    tensors: Mapping[str, Tensor]

    def names(self) -> Collection[str]:
        return self.tensors.keys()

    def tensor(self, name: str) -> Tensor:
        return self.tensors[name]


def saying(saved: Base, folder: Path, quantised: dict[str, Any]) -> Path:
    """A folder with the configuration of ``saved``, which says how its files are quantised."""
    config = json.loads((saved.folder / "config.json").read_text()) | {"quantization_config": quantised}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def in_mxfp4(saved: Base, folder: Path, dtype: torch.dtype) -> tuple[InFiles, Base]:
    """The files of a gpt-oss with other experts, and a plain base whose experts have their values in ``dtype``, as
    transformers makes them."""
    tensors = packed_experts(saved.model.state_dict())
    said = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    model: Any = copy.deepcopy(saved.model)
    for index, layer in enumerate(model.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            parts = (
                tensors[f"model.layers.{index}.mlp.experts.{name}_{end}"] for end in ("blocks", "scales")
            )
            theirs = convert_moe_packed_tensors(*parts, dtype=dtype)
            getattr(layer.mlp.experts, name).data = theirs.float()
    return InFiles(saying(saved, folder, said), model, tensors), Base(saved.folder, model)


def in_fp8(
    saved: Base, folder: Path, dtype: torch.dtype, block: tuple[int, int] | None
) -> tuple[InFiles, Base]:
    """The same of linear modules and experts, each matrix by itself, in blocks or (None) with a scale for each output."""
    saved.model.save_pretrained(folder)
    tensors, values = dict[str, Tensor](), dict[str, Tensor]()
    generator = torch.Generator().manual_seed(0)
    for name, tensor in load_file(folder / "model.safetensors").items():
        tensors[name] = values[name] = tensor
        if "_proj" not in name:
            continue
        rows, columns = tensor.shape
        scales = torch.rand(
            (rows, 1) if block is None else scales_of((rows, columns), block), generator=generator
        )
        scales = (scales + 0.1) / 500
        wide = scales
        if block is not None:
            wide = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:rows, :columns]
        tensors[name] = (tensor / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scales
        values[name] = (tensors[name].float() * wide).to(dtype).float()
    said = {"quant_method": "fp8", "weight_block_size": block, "modules_to_not_convert": ["lm_head"]}
    save_file(values, folder / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    model.config._experts_implementation = "eager"
    return InFiles(saying(saved, folder, said), model, tensors), Base(saved.folder, model)


FORMS = {
    "mxfp4": ("gpt_oss", in_mxfp4),
    "fp8, by block": ("qwen3_moe", partial(in_fp8, block=(16, 16))),
    "fp8, by block that does not divide": ("qwen3_moe", partial(in_fp8, block=(20, 28))),
    "fp8, by output": ("qwen3_moe", partial(in_fp8, block=None)),
}
BOTH = ("experts.gate_up_proj", "experts.down_proj")


def on_experts(**options: Any) -> LoRAConfig:
    return LoRAConfig(
        **{"target_modules": ("o_proj",), "target_parameters": BOTH, "rank": 3, "alpha": 6, **options}
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adapters_on_experts_as_published_equal_those_on_plain_ones_bit_for_bit(
    small_model: Callable[..., Any],
    rows: Callable[..., list[Row]],
    tmp_path: Path,
    form: str,
    dtype: torch.dtype,
) -> None:
    model_type, packed = FORMS[form]
    saved = wider(small_model, model_type)
    base, plain = packed(saved, tmp_path / "packed", dtype)
    own = Task("own", on_experts(), TRAINING, rows(7, 1, vocabulary=97), 4)
    tasks = [
        Task("attention", on_experts(target_parameters=()), TRAINING, rows(5, 3, vocabulary=97), 4),
        own,
        Task("experts", on_experts(rank=2, target_modules=()), TRAINING, rows(5, 2, vocabulary=97), 4),
    ]
    alone = train(base, 1, [own], dtype=dtype)["own"]
    assert alone.losses != train(saved, 1, [own], dtype=dtype)["own"].losses
    for stages in (1, 2, 3):
        found, wanted = (train(one, stages, tasks, dtype=dtype) for one in (base, plain))
        for name, trained in found.items():
            assert trained.losses == wanted[name].losses
            assert largest_difference(trained.adapter, wanted[name].adapter) == 0.0
        if stages == 1:
            assert found["own"].losses == alone.losses
            assert largest_difference(found["own"].adapter, alone.adapter) == 0.0


@pytest.mark.parametrize("form", FORMS)
def test_ten_steps_on_experts_as_published_equal_peft_on_their_values(
    small_model: Callable[..., Any], rows: Callable[..., list[Row]], tmp_path: Path, form: str
) -> None:
    model_type, packed = FORMS[form]
    base, plain = packed(wider(small_model, model_type), tmp_path / "packed", torch.float32)
    single = Training(
        batch_size=1,
        gradient_accumulation_steps=2,
        learning_rate=5e-3,
        warmup_steps=2,
        max_grad_norm=1.0,
        seed=3,
    )
    task = Task("t", on_experts(), single, rows(11, 1, longest=16, vocabulary=97), 10)
    neighbour = Task("n", on_experts(rank=2), single, rows(4, 2, longest=20, vocabulary=97), 4)
    config = LoraConfig(
        r=3, lora_alpha=6, target_modules=["o_proj"], target_parameters=[*BOTH], task_type="CAUSAL_LM"
    )
    for stages in (1, 2):
        ours = train(base, stages, [task, neighbour])["t"]
        theirs = train_with_peft(plain, task, ours.start, config=config)
        assert_same(ours, theirs, losses=1e-4, weights=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed_experts_of_gpt_oss_have_the_values_that_transformers_makes_of_them(
    small_model: Any, tmp_path: Path, dtype: torch.dtype
) -> None:
    saved = small_model("gpt_oss", **(FAMILY["gpt_oss"] | {"intermediate_size": 64}))
    base, plain = in_mxfp4(Base(saved.folder, saved.model), tmp_path, dtype)
    save_file(
        {name: tensor.contiguous() for name, tensor in base.tensors.items()}, tmp_path / "model.safetensors"
    )
    model: Any = plain.model
    stage = whole_stage(tmp_path, dtype)
    layers: Any = zip(model.model.layers, stage.layers, strict=True)
    for layer, own in layers:
        theirs, ours = layer.mlp.experts, own.mlp.experts
        for expert in range(6):
            assert torch.equal(ours.gate[expert].dense(torch.float32), theirs.gate_up_proj[expert, :, ::2].T)
            assert torch.equal(ours.up[expert].dense(torch.float32), theirs.gate_up_proj[expert, :, 1::2].T)
            assert torch.equal(ours.down[expert].dense(torch.float32), theirs.down_proj[expert].T)
    (shape,) = stage_shapes(tmp_path, 1, dtype)
    assert (shape.resident_bytes, shape.parameters) == (stage.resident_bytes, stage.parameters)
    assert stage.quantised
    if dtype == torch.float32:
        wanted = model(input_ids=IDS[None]).logits[0]
        torch.testing.assert_close(logits(stage), wanted, rtol=1e-5, atol=1e-5)


def test_experts_of_a_checkpoint_in_fp8_are_used_as_they_are(small_model: Any, tmp_path: Path) -> None:
    saved = small_model("qwen3_moe", **FAMILY["qwen3_moe"])
    saved.model.save_pretrained(tmp_path)
    block, tensors = (16, 16), dict[str, Tensor]()
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        if "_proj" not in name:
            tensors[name] = tensor
            continue
        scales = torch.rand(scales_of((tensor.shape[0], tensor.shape[1]), block)) / 100
        wide = scales.repeat_interleave(16, 0).repeat_interleave(16, 1)[: tensor.shape[0], : tensor.shape[1]]
        tensors[f"{name}_scale_inv"] = scales
        tensors[name] = (tensor / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "model.safetensors")
    said = {"quant_method": "fp8", "weight_block_size": [16, 16], "modules_to_not_convert": ["lm_head"]}
    config = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": said}
    (tmp_path / "config.json").write_text(json.dumps(config))
    stage = whole_stage(tmp_path, torch.float32)
    for expert in range(6):
        name = f"model.layers.2.mlp.experts.{expert}.up_proj.weight"
        wide = tensors[f"{name}_scale_inv"].repeat_interleave(16, 0).repeat_interleave(16, 1)
        wanted = tensors[name].float() * wide[:20, :32]
        found: Any = stage.layers[2]
        torch.testing.assert_close(
            found.mlp.experts.up[expert].dense(torch.float32), wanted, rtol=1e-6, atol=0
        )
    (shape,) = stage_shapes(tmp_path, 1, torch.float32)
    assert shape.resident_bytes == stage.resident_bytes
