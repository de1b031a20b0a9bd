"""Bases with routed experts: what is published of them is read, and neighbours, PEFT and quantisation are as elsewhere.

That each type computes what transformers does, and trains as PEFT does, is in the tests of all types.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from bench.base import whole_stage
from mlora_worker.frozen.experts import FrozenExperts
from mlora_worker.frozen.four_bits import nf4
from mlora_worker.frozen.fp8 import scales_of
from mlora_worker.frozen.int8 import int8
from mlora_worker.frozen.linear import Freeze
from mlora_worker.frozen.plain import PlainWeight
from mlora_worker.model.attention import PackedRows
from mlora_worker.model.errors import InvalidTarget, UnknownTargetModule
from mlora_worker.model.facts import model_facts, resolve_targets, stage_shapes
from mlora_worker.model.load import load_stage
from mlora_worker.protocol import AdapterType, LoRAConfig, Training
from mlora_worker.storage.artifacts.adapter import CONFIG_NAME, adapter_config, save_weights
from mlora_worker.stream.targets import published_names
from tests.equivalence.plain_peft import train_with_peft
from tests.equivalence.tasks import Base, Row, Task, Trained, assert_same, largest_difference, train
from tests.fixtures.model_options import EXPERT_TYPES, FAMILY, TARGETS

CPU = torch.device("cpu")
IDS = torch.randint(3, 97, (19,), generator=torch.Generator().manual_seed(0))
NF4: Freeze = partial(nf4, double=True)


def lora(model_type: str, **options: Any) -> LoRAConfig:
    return LoRAConfig(**{"target_modules": TARGETS.get(model_type, ("all-linear",)), "rank": 4, **options})


def stored(folder: Path) -> list[str]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return list(file.keys())


@torch.no_grad()
def logits(stage: Any) -> Tensor:
    rows = PackedRows((len(IDS),), CPU)
    return stage.logits(stage.run_layers(stage.embed(IDS, rows), rows))  # type: ignore[no-any-return]


# Of one layer's experts, in files that are published.
STORED = dict.fromkeys(EXPERT_TYPES, "mlp.experts.5.up_proj.weight") | {
    "deepseek_v3": "mlp.experts.7.up_proj.weight",
    "gpt_oss": "mlp.experts.gate_up_proj_bias",
    "granitemoe": "block_sparse_moe.input_linear.weight",
    "granitemoehybrid": "block_sparse_moe.input_linear.weight",
    "granitemoeshared": "block_sparse_moe.input_linear.weight",
    "lfm2_moe": "feed_forward.experts.5.w3.weight",
    "minimax_m2": "block_sparse_moe.experts.5.w3.weight",
    "mixtral": "block_sparse_moe.experts.5.w3.weight",
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


TRAINING = Training(batch_size=3, learning_rate=2e-3, seed=5)


def wider(small_model: Any, model_type: str = "qwen3_moe") -> Base:
    """Wide enough for products whose bits depend on the number of rows."""
    own = FAMILY[model_type]
    sizes = {"hidden_size": 96, "head_dim": 32, "intermediate_size": 64}
    sizes["num_local_experts" if "num_local_experts" in own else "num_experts"] = 4
    inner = ("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size")
    sizes |= {name: 64 for name in inner if name in own}
    saved = small_model(model_type, **(FAMILY[model_type] | sizes))
    return Base(saved.folder, saved.model)


@pytest.mark.parametrize(
    ("model_type", "recompute"),
    [("qwen3_moe", False), ("qwen3_moe", True), ("qwen3_next", False), ("granitemoehybrid", False)],
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


def on_its_values(base: Base, freeze: Freeze, dtype: torch.dtype) -> Base:
    """The plain base whose matrices, those of experts with them, are those that a quantised one has."""
    model: Any = copy.deepcopy(base.model)
    for module in model.model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = freeze(module.weight.data.to(dtype)).dense(torch.float32)
        if hasattr(module, "gate_up_proj"):
            width = module.gate_up_proj.shape[1] // 2
            for stack in (
                module.gate_up_proj.data[:, :width],
                module.gate_up_proj.data[:, width:],
                module.down_proj.data,
            ):
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
def test_quantised_experts_equal_plain_ones_with_the_same_values_bit_for_bit(
    small_model: Any, rows: Callable[..., list[Row]], freeze: Freeze, dtype: torch.dtype
) -> None:
    base = wider(small_model)
    tasks = [
        Task("a", lora("qwen3_moe"), TRAINING, rows(7, 1, vocabulary=97), 4),
        Task("b", lora("qwen3_moe", rank=2), TRAINING, rows(5, 2, vocabulary=97), 4),
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed_experts_of_gpt_oss_have_the_values_that_transformers_makes_of_them(
    small_model: Any, tmp_path: Path, dtype: torch.dtype
) -> None:
    saved = small_model("gpt_oss", **(FAMILY["gpt_oss"] | {"intermediate_size": 64}))
    published = packed_experts(saved.model.state_dict())
    said = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    config = json.loads((saved.folder / "config.json").read_text()) | {"quantization_config": said}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.contiguous() for name, tensor in published.items()}, tmp_path / "model.safetensors"
    )
    model: Any = copy.deepcopy(saved.model)
    for index, layer in enumerate(model.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            parts = (
                published[f"model.layers.{index}.mlp.experts.{name}_{end}"] for end in ("blocks", "scales")
            )
            theirs = convert_moe_packed_tensors(*parts, dtype=dtype)
            getattr(layer.mlp.experts, name).data = theirs.float()
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


def published(base: Base, asked: LoRAConfig, folder: Path, trained: Trained) -> None:
    facts = model_facts(base.folder, 1, torch.float32)
    names = published_names(facts, resolve_targets(facts, asked))
    save_weights(trained.adapter, folder)
    (folder / CONFIG_NAME).write_text(json.dumps(adapter_config(asked, "tiny", None, names)))


@pytest.mark.parametrize("model_type", EXPERT_TYPES)
def test_the_published_adapter_loads_in_peft_with_every_key(
    small_model: Any, tmp_path: Path, rows: Callable[..., list[Row]], model_type: str
) -> None:
    saved = small_model(model_type, **FAMILY[model_type])
    base, asked = Base(saved.folder, saved.model), lora(model_type, dropout=0.1)
    trained = train(base, 1, [Task("t", asked, TRAINING, rows(6, 1, vocabulary=97), 8)])["t"]
    published(base, asked, tmp_path, trained)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # PEFT warns of missing and of unexpected keys
        model = PeftModel.from_pretrained(copy.deepcopy(saved.model), tmp_path)
    held = {
        name.replace(".default", ""): tensor for name, tensor in model.named_parameters() if "lora_" in name
    }
    assert held.keys() == trained.adapter.keys()
    assert all(torch.equal(held[name], tensor) for name, tensor in trained.adapter.items())
    without = saved.model(IDS[None]).logits
    assert (model(IDS[None]).logits - without).norm() > 0.01 * without.norm()


def adapted_by_peft(model: Any, words: Any) -> set[str]:
    found = get_peft_model(copy.deepcopy(model), LoraConfig(r=3, target_modules=words, task_type="CAUSAL_LM"))
    return {
        name.removeprefix("base_model.model.").partition(".lora_A")[0]
        for name, _ in found.named_parameters()
        if "lora_A" in name
    }


@pytest.mark.parametrize("model_type", EXPERT_TYPES)
def test_all_linear_is_what_it_is_in_peft_or_refused(small_model: Any, model_type: str) -> None:
    saved = small_model(model_type, **FAMILY[model_type])
    facts, theirs = model_facts(saved.folder, 2, torch.float32), adapted_by_peft(saved.model, "all-linear")
    every = LoRAConfig(rank=1, target_modules=("all-linear",))
    if not any(stack.in_peft for stack in facts.experts or ()):
        assert {target.path for target in resolve_targets(facts, every)} == theirs
        return
    assert any("experts" in path for path in theirs), "PEFT adapts them"
    assert any(path.endswith(("mlp.gate", "mlp.gate.wg")) for path in theirs)
    with pytest.raises(InvalidTarget, match=r"all-linear adapts the routed experts.*such as \[(q_|in_)"):
        resolve_targets(facts, every)
    of_vera = LoRAConfig(
        type=AdapterType.VERA, rank=3, target_modules=("all-linear",)
    )  # for which PEFT changes no word
    linear = {name for name, one in saved.model.named_modules() if isinstance(one, torch.nn.Linear)}
    linear = {name for name in linear if name != "lm_head" and not name.endswith("mlp.gate.wg")}  # a router
    assert {target.path for target in resolve_targets(facts, of_vera)} == linear
    named = LoRAConfig(rank=3, target_modules=TARGETS[model_type])
    ours = {target.path for target in resolve_targets(facts, named)}
    assert ours == adapted_by_peft(saved.model, [*TARGETS[model_type]])
    assert ours == {path for path in theirs if "_attn" in path}
    assert not any("shared_expert" in path and "gate" not in path for path in theirs), (
        "and these it leaves out"
    )


@pytest.mark.parametrize(
    ("model_type", "entry", "error", "told"),
    [
        (
            "mixtral",
            "w1",
            InvalidTarget,
            "w1 means the routed experts .* remove it, and name experts in targetParameters",
        ),
        ("olmoe", "mlp.gate", InvalidTarget, "means the routed experts"),
        (
            "qwen3_moe",
            "up_proj",
            InvalidTarget,
            r"write a pattern, .* such as \.\*\\\.mlp\.(gate|up)_proj",
        ),
        (
            "olmoe",
            "experts.gate_up_proj",
            UnknownTargetModule,
            "routed experts belong in targetParameters, and a router gets no adapter",
        ),
        ("granitemoe", "router", UnknownTargetModule, "a router gets no adapter"),
        ("mixtral", "lm_head", UnknownTargetModule, "the head and the embeddings"),
    ],
)
def test_experts_and_routers_are_refused_by_name(
    small_model: Any, model_type: str, entry: str, error: type[Exception], told: str
) -> None:
    facts = model_facts(small_model(model_type, **FAMILY[model_type]).folder, 1, torch.float32)
    with pytest.raises(error, match=told):
        resolve_targets(facts, LoRAConfig(rank=3, target_modules=("q_proj", entry)))


DENSE = r".*\.(gate|up|down)_proj"


@pytest.mark.parametrize(
    ("model_type", "parts"),
    [
        ("deepseek_v3", ("mlp", "mlp.shared_experts")),
        ("glm4_moe", ("mlp", "mlp.shared_experts")),
        ("hunyuan_v1_moe", ("mlp.shared_mlp",)),
        ("qwen3_moe", ("mlp",)),
        ("qwen3_next", ("mlp", "mlp.shared_expert")),
    ],
)
def test_dense_layers_and_shared_experts_train_as_in_peft_and_load_there(
    small_model: Any, tmp_path: Path, rows: Callable[..., list[Row]], model_type: str, parts: tuple[str, ...]
) -> None:
    """PEFT takes gate_proj for the routed experts: those of others are parameters for it."""
    saved = small_model(model_type, **FAMILY[model_type])
    base = Base(saved.folder, saved.model)
    asked = LoRAConfig(rank=4, alpha=6, target_modules=("o_proj", DENSE))
    task = Task("t", asked, Training(batch_size=1, learning_rate=1e-3, seed=1), rows(6, 1, vocabulary=97), 6)
    trained = train(base, 2, [task])["t"]
    published(base, asked, tmp_path, trained)
    config = LoraConfig.from_pretrained(tmp_path)
    config.inference_mode = False
    names = [f"{part}.{one}_proj.weight" for part in parts for one in ("down", "gate", "up")]
    assert config.target_parameters == sorted(names)
    theirs = train_with_peft(base, task, trained.start, config=config)
    assert_same(trained, theirs, losses=1e-4, weights=1e-4)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        PeftModel.from_pretrained(copy.deepcopy(saved.model), tmp_path)
    for wrong in ({"dropout": 0.1}, {"rank_pattern": {"up_proj": 2}}, {"use_dora": True}):
        with pytest.raises(InvalidTarget, match="target_parameters"):
            resolve_targets(model_facts(base.folder, 1, torch.float32), asked.model_copy(update=wrong))


def test_plain_experts_are_not_held_twice(small_model: Any) -> None:
    saved = small_model("olmoe", **FAMILY["olmoe"])
    stage = load_stage(saved.folder, saved, 0, 1, torch.float32, CPU, PlainWeight)
    own = sum(parameter.nbytes for parameter in saved.model.parameters())
    assert own <= stage.resident_bytes < own + 1000
