"""Checkpoints that come quantised: each stage reads its own as they are, and what is not known is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mlora_worker.frozen.four_bits import nf4
from mlora_worker.frozen.fp8 import BlockFp8Weight
from mlora_worker.frozen.int8 import int8
from mlora_worker.frozen.quantised import QuantisedWeight
from mlora_worker.model import quantisation
from mlora_worker.model.errors import IncompleteModel, UnsupportedModel
from mlora_worker.model.facts import stage_shapes
from mlora_worker.model.load import load_stage
from mlora_worker.model.stored_forms import Mxfp4
from mlora_worker.protocol import Quantization
from tests.unit.worker.frozen.test_quantised import FP8, fp8

CPU = torch.device("cpu")
FIRST = "model.layers.0.self_attn.q_proj.weight"


@dataclass
class Files:
    """The tensors of a quantised checkpoint, and what its matrices are worth."""

    folder: Path
    tensors: dict[str, Tensor]
    values: dict[str, Tensor] = field(default_factory=dict)

    def names(self) -> Collection[str]:
        return self.tensors

    def tensor(self, name: str) -> Tensor:
        return self.tensors[name]


def as_fp8(name: str, matrix: Tensor) -> tuple[dict[str, Tensor], QuantisedWeight]:
    made = fp8(matrix)
    return {name: made.get_buffer("numbers"), f"{name}_scale_inv": made.get_buffer("scales")}, made


def as_fp8_by_channel(name: str, matrix: Tensor) -> tuple[dict[str, Tensor], QuantisedWeight]:
    scales = matrix.abs().amax(1, keepdim=True) / 448
    made = BlockFp8Weight(
        (matrix / scales).to(torch.float8_e4m3fn), scales, (1, matrix.shape[1]), matrix.dtype
    )
    return {name: made.get_buffer("numbers"), f"{name}_scale_inv": scales}, made


def as_fp8_by_tensor(name: str, matrix: Tensor) -> tuple[dict[str, Tensor], QuantisedWeight]:
    scale = matrix.abs().max() / 448
    made = BlockFp8Weight(
        (matrix / scale).to(torch.float8_e4m3fn),
        scale.expand(len(matrix), 1),
        (1, matrix.shape[1]),
        matrix.dtype,
    )
    return {name: made.get_buffer("numbers"), f"{name}_scale_inv": scale}, made


def as_eight_bits(name: str, matrix: Tensor) -> tuple[dict[str, Tensor], QuantisedWeight]:
    made = int8(matrix)
    path = name.removesuffix(".weight")
    largest = 127 * made.get_buffer("scales")
    return {
        name: made.get_buffer("numbers"),
        f"{path}.SCB": largest,
        f"{path}.weight_format": torch.tensor(0),
    }, made


def as_four_bits(name: str, matrix: Tensor) -> tuple[dict[str, Tensor], QuantisedWeight]:
    from bitsandbytes.functional import quantize_4bit

    packed, state = quantize_4bit(matrix, compress_statistics=True, quant_type="nf4")
    beside = {f"{name}.{key}": tensor for key, tensor in state.as_dict(packed=True).items()}
    return {name: packed, **beside}, nf4(matrix, double=True)


FORMS: dict[
    str, tuple[Callable[[str, Tensor], tuple[dict[str, Tensor], QuantisedWeight]], dict[str, Any]]
] = {
    "fp8": (as_fp8, {"quant_method": "fp8", "weight_block_size": list(FP8), "activation_scheme": "dynamic"}),
    "fp8 by channel": (as_fp8_by_channel, {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    "fp8 by tensor": (as_fp8_by_tensor, {"quant_method": "fp8", "weight_block_size": None}),
    "8 bits": (as_eight_bits, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "4 bits": (
        as_four_bits,
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True},
    ),
}


@pytest.fixture
def files(small_model: Any) -> Callable[..., Files]:
    """``files(form, *plain)``: all matrices of the layers but those of the named modules are quantised."""

    def make(form: str, *plain: str, **config: Any) -> Files:
        saved = small_model("llama", tie_word_embeddings=False)
        pack, said = FORMS[form]
        made = Files(saved.folder, {})
        for name, tensor in saved.model.state_dict().items():
            stays = "layers" not in name or "norm" in name or any(f".{one}." in name for one in plain)
            packed, weight = ({name: tensor}, None) if stays else pack(name, tensor)
            made.tensors |= packed
            if weight is not None:
                made.values[name] = weight.dense(torch.float32)
        path = saved.folder / "config.json"
        said = said | {"modules_to_not_convert": [*plain, "lm_head"]} | config
        path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": said}))
        return made

    return make


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("stages", [1, 2])
def test_matrices_stay_as_they_were_published_and_the_bytes_are_those_of_the_plan(
    files: Any, form: str, stages: int
) -> None:
    made = files(form, "o_proj")
    found = {}
    for shape in stage_shapes(made.folder, stages, torch.float32):
        stage = load_stage(made.folder, made, shape.stage, stages, torch.float32, CPU)
        assert stage.resident_bytes == shape.resident_bytes
        assert stage.quantised
        assert shape.quantized
        for path, linear in stage.linears.items():
            kept = isinstance(linear.weight, QuantisedWeight)
            assert kept is not path.endswith("o_proj")
            if kept:
                found[f"{path}.weight"] = linear.weight.dense(torch.float32)
    assert found.keys() == made.values.keys()
    for name, value in made.values.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)


def test_a_plain_base_is_not_called_quantised(small_model: Any) -> None:
    saved = small_model("llama")
    assert load_stage(saved.folder, saved, 0, 1, torch.float32, CPU).quantised is False
    assert load_stage(saved.folder, saved, 0, 1, torch.float32, CPU, int8).quantised is True


def test_quantising_once_more_is_refused(files: Any) -> None:
    made = files("fp8")
    with pytest.raises(
        UnsupportedModel, match=r"quantised already, and model.quantization nf4 would round it again"
    ):
        stage_shapes(made.folder, 1, torch.float32, Quantization(type="nf4"))


def test_without_the_library_4_bits_are_refused_before_anything_is_read(
    files: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = files("4 bits")
    monkeypatch.setattr(quantisation, "available", lambda: False)
    made.tensors = {}
    with pytest.raises(UnsupportedModel, match=r"needs bitsandbytes.* 'mlora-operator\[quantised\]'"):
        load_stage(made.folder, made, 0, 1, torch.float32, CPU)
    with pytest.raises(UnsupportedModel, match=r"model.quantization nf4 needs bitsandbytes"):
        quantisation.freeze_of(Quantization(type="nf4"))
    assert quantisation.freeze_of(Quantization(type="int8")) is int8
    assert stage_shapes(made.folder, 1, torch.float32)[0].quantized, "a plan needs no library"


@pytest.mark.parametrize(
    ("form", "change", "words"),
    [
        ("fp8", {f"{FIRST}_scale_inv": torch.ones(1, 1)}, r"scale_inv has shape \[1, 1\]"),
        ("fp8", {FIRST: torch.zeros(32, 32)}, "is of type float32 in the model's files"),
        (
            "fp8 by channel",
            {f"{FIRST}_scale_inv": torch.ones(7)},
            r"shape \[7\] .* one for each of 32 outputs",
        ),
        (
            "fp8 by tensor",
            {f"{FIRST}_scale_inv": torch.ones((), dtype=torch.uint8)},
            "of type uint8 and shape",
        ),
        ("8 bits", {FIRST.replace("weight", "SCB"): torch.ones(7)}, r"SCB has shape \[7\]"),
        (
            "4 bits",
            {f"{FIRST}.quant_state.bitsandbytes__nf4": torch.zeros(9, dtype=torch.uint8)},
            "no usable 4-bit",
        ),
    ],
)
def test_damaged_files_are_refused_by_the_tensors_name(
    files: Any, form: str, change: dict[str, Tensor], words: str
) -> None:
    made = files(form)
    made.tensors |= change
    with pytest.raises(IncompleteModel, match=words):
        load_stage(made.folder, made, 0, 1, torch.float32, CPU)


class Stack:
    """One of two experts with matrices [3, 64], in the form of gpt-oss."""

    def __init__(self, blocks: torch.dtype = torch.uint8, scales: torch.dtype = torch.uint8) -> None:
        self.tensors = {
            "stack_blocks": torch.zeros(2, 3, 2, 16, dtype=blocks),
            "stack_scales": torch.full((2, 3, 2), 127, dtype=scales),
        }

    def names(self) -> Collection[str]:
        return self.tensors

    def stored(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        assert shape == self.tensors[name].shape
        return self.tensors[name]


def test_packed_stacks_of_other_numbers_are_not_taken_for_theirs() -> None:
    part = Mxfp4().stack(Stack(), "stack", (2, 3, 64), torch.float32, CPU)
    assert part(1, slice(0, 2)).shape == (2, 64)
    for damaged in (Stack(blocks=torch.int32), Stack(scales=torch.float32)):
        with pytest.raises(IncompleteModel, match=r"tensor stack .*quantization_config .* means uint8"):
            Mxfp4().stack(damaged, "stack", (2, 3, 64), torch.float32, CPU)
    with pytest.raises(IncompleteModel, match=r"stack cannot be in blocks: .* rows of 65 numbers"):
        Mxfp4().stack(Stack(), "stack", (2, 3, 65), torch.float32, CPU)


def test_packed_numbers_without_scales_are_not_taken_for_values(files: Any) -> None:
    made = files("fp8")
    del made.tensors[f"{FIRST}_scale_inv"]
    with pytest.raises(IncompleteModel, match=r"float8_e4m3fn .* says nothing of how it is quantised"):
        load_stage(made.folder, made, 0, 1, torch.float32, CPU)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (
            {"quant_method": "gptq", "bits": 4},
            r"\(gptq\).* only its own kernels .* model.quantization nf4 or int8",
        ),
        ({"quant_method": "awq"}, r"\(awq\)"),
        ({"quant_method": "compressed-tensors"}, r"\(compressed-tensors\)"),
        ({"quant_method": "hqq"}, r"\(hqq\)"),
        ({"quant_method": "hqq"}, r"\(hqq\), and it has not been compared"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"\(fp8\) with weight_block_size \[128\]"),
        ({"quant_method": "fbgemm_fp8"}, r"\(fbgemm_fp8\), and it has not been compared: use .* plain float"),
        ({"bits": 4}, r"\(without a name\)"),
    ],
)
def test_other_forms_are_refused_by_name_with_the_way_out(
    small_model: Any, said: dict[str, Any], words: str
) -> None:
    folder = small_model("llama").folder
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": said}))
    with pytest.raises(UnsupportedModel, match=words):
        stage_shapes(folder, 1, torch.float32)
