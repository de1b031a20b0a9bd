"""`mlora export --plain`: one rank, one alpha and each expert's own matrices add to every weight what PEFT adds."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig
from typer.testing import CliRunner

from mlora_operator.cli.app import app
from mlora_operator.download import Access, open_source, read_manifest
from mlora_operator.sync.needs import AdapterNeeds, needs_of
from mlora_worker.commands.plain_export import export
from mlora_worker.protocol import MergeAnswer, MergeQuestion
from tests.fixtures.model_options import FAMILY
from tests.fixtures.published import publish_files

SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
ODD = {
    "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.down_proj": 6},
    "alpha_pattern": {"k_proj": 3, "q_proj": 5},
}
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
FIGURES = {"rank_pattern": {"gate_up_proj": 5, "q_proj": 2}, "alpha_pattern": {r".*experts\.down_proj": 9.0}}


def adapter_of(model: Any, folder: Path, **lora: Any) -> dict[str, Tensor]:
    """In ``folder``, with a B that is not zero; what PEFT adds to each weight, by the path of its module or parameter."""
    adapted: Any = get_peft_model(
        model, LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], **lora})
    )
    torch.manual_seed(5)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(folder)
    found = {}
    for name, module in adapted.named_modules():
        if hasattr(module, "get_delta_weight"):
            path = name.removeprefix("base_model.model.").removesuffix(".base_layer")
            path += f".{module.parameter_name}" if hasattr(module, "parameter_name") else ""
            found[path] = module.get_delta_weight("default").detach()
    return found


def ask(folder: Path, base: Path, **more: Any) -> MergeAnswer:
    return export(
        MergeQuestion(adapter=str(folder / "adapter"), base=str(base), output=str(folder / "plain"), **more)
    )


def added(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What a server adds to each matrix: it knows one rank and one alpha."""
    config = json.loads((folder / "adapter_config.json").read_text())
    assert not config.keys() & {"rank_pattern", "alpha_pattern", "use_rslora", "target_parameters"}
    assert isinstance(config["lora_alpha"], int)
    tensors, found = load_file(folder / "adapter_model.safetensors"), {}
    for name, a in tensors.items():
        if name.endswith(".lora_A.weight"):
            b = tensors[name.replace("lora_A", "lora_B")]
            assert a.shape[0] == b.shape[1] == config["r"]
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            found[module] = config["lora_alpha"] / config["r"] * (b @ a)
    assert len(tensors) == 2 * len(found)
    assert set(config["target_modules"]) == {module.rpartition(".")[2] for module in found}
    return found, config


def assert_same(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(
            ours[name], tensor, rtol=1e-5, atol=1e-6, msg=lambda words, at=name: f"{at}: {words}"
        )


@pytest.fixture
def llama(tmp_path: Path) -> Any:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL), dtype=torch.float32)
    model.save_pretrained(tmp_path / "base")
    return model


@pytest.mark.parametrize(
    ("lora", "rank"),
    [({}, 4), ({"use_rslora": True, "lora_alpha": 12.5}, 4), (ODD, 6), (ODD | {"use_rslora": True}, 6)],
)
def test_what_is_added_to_linear_modules_stays_and_peft_loads_it(
    llama: Any, tmp_path: Path, lora: dict[str, Any], rank: int
) -> None:
    theirs = adapter_of(llama, tmp_path / "adapter", target_modules="all-linear", **lora)
    answer = ask(tmp_path, tmp_path / "base")
    assert (answer.failure, answer.dtype) == (None, "float32")
    ours, config = added(tmp_path / "plain")
    assert_same(ours, theirs)
    assert config["r"] == rank
    loaded = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "plain"
    )
    again = {
        name.removeprefix("base_model.model."): module.get_delta_weight("default").detach()
        for name, module in loaded.named_modules()
        if hasattr(module, "get_delta_weight")
    }
    assert_same(again, theirs)


def test_a_plain_adapter_keeps_its_bits(llama: Any, tmp_path: Path) -> None:
    adapter_of(llama, tmp_path / "adapter", target_modules="all-linear")
    ask(tmp_path, tmp_path / "base")
    before, after = (load_file(tmp_path / one / "adapter_model.safetensors") for one in ("adapter", "plain"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(("model_type", "block", "names"), [
    ("qwen3_moe", "mlp", ("gate_proj", "up_proj", "down_proj")),
    ("olmoe", "mlp", ("gate_proj", "up_proj", "down_proj")),
    ("granitemoe", "block_sparse_moe", ("gate_proj", "up_proj", "down_proj")),
    ("mixtral", "block_sparse_moe", ("w1", "w3", "w2")),
])  # fmt: skip
@pytest.mark.parametrize("lora", [{}, FIGURES, {"target_modules": [], "use_rslora": True}], ids=str)
def test_each_expert_gets_what_peft_adds_to_its_part_of_the_parameters(
    small_model: Callable[..., Any],
    tmp_path: Path,
    model_type: str,
    block: str,
    names: tuple[str, str, str],
    lora: dict[str, Any],
) -> None:
    saved = small_model(model_type, **FAMILY[model_type])
    parameters = [one.replace("mlp.", "") for one in BOTH]
    theirs = adapter_of(saved.model, tmp_path / "adapter", target_parameters=parameters, **lora)
    assert ask(tmp_path, saved.folder).failure is None
    ours, _ = added(tmp_path / "plain")
    assert_same(ours, by_expert(theirs, block, names))


def by_expert(theirs: Mapping[str, Tensor], block: str, names: tuple[str, str, str]) -> dict[str, Tensor]:
    gate, up, down = names
    found = {}
    for path, tensor in theirs.items():
        place, _, parameter = path.rpartition(".")
        if not place.endswith(".experts"):
            found[path] = tensor
            continue
        place = f"{place.removesuffix('.experts').rpartition('.')[0]}.{block}.experts"
        for expert, matrix in enumerate(tensor):
            if parameter == "down_proj":
                found[f"{place}.{expert}.{down}"] = matrix
            else:
                found[f"{place}.{expert}.{gate}"], found[f"{place}.{expert}.{up}"] = matrix.chunk(2)
    return found


@pytest.mark.parametrize("parameter", ["gate_up_proj", "down_proj"])
def test_the_parameter_that_has_no_adapter_gets_zeros(
    small_model: Callable[..., Any], tmp_path: Path, parameter: str
) -> None:
    saved = small_model("qwen3_moe", **FAMILY["qwen3_moe"])
    theirs = adapter_of(saved.model, tmp_path / "adapter", target_parameters=[f"experts.{parameter}"])
    assert ask(tmp_path, saved.folder).failure is None
    ours, _ = added(tmp_path / "plain")
    expected = by_expert(theirs, "mlp", ("gate_proj", "up_proj", "down_proj"))
    assert_same({name: ours[name] for name in expected}, expected)
    others = ours.keys() - expected.keys()
    assert others
    assert not any(bool(ours[name].any()) for name in others)


def test_as_the_task_published_it_so_its_copy_can_be_fetched_and_synced(
    small_model: Callable[..., Any], tmp_path: Path
) -> None:
    saved = small_model("mixtral", **FAMILY["mixtral"])
    adapter_of(saved.model, tmp_path / "adapter", target_parameters=BOTH)
    files = {
        name: (tmp_path / "adapter" / name).read_bytes()
        for name in ("adapter_model.safetensors", "adapter_config.json")
    }
    stamps = {"fingerprint": "f", "loss": 0.5, "baseModelType": "mixtral"}
    publish_files(tmp_path / "adapter", files | {"chat_template.jinja": b"{{ 1 }}"}, **stamps)
    result = CliRunner().invoke(
        app,
        [
            "export",
            str(tmp_path / "adapter"),
            str(tmp_path / "plain"),
            "--plain",
            "--base",
            str(saved.folder),
        ],
    )
    assert result.exit_code == 0, result.output
    assert "written:" in result.output
    manifest = read_manifest(open_source((tmp_path / "plain").as_uri(), Access()))
    assert (manifest.task_uid, manifest.base_model, manifest.step) == ("u", "acme/base", 12)
    assert {file.name for file in manifest.files} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "chat_template.jinja",
    }
    assert "baseModelType" not in manifest.as_json()
    assert needs_of(tmp_path / "plain") == AdapterNeeds()
    assert needs_of(tmp_path / "adapter") == AdapterNeeds(stacked=True, base_type="mixtral")


def test_what_cannot_be_plain_is_refused_and_nothing_is_left(
    llama: Any, small_model: Callable[..., Any], tmp_path: Path
) -> None:
    adapter_of(llama, tmp_path / "adapter", use_dora=True)
    refused = ask(tmp_path, tmp_path / "base").failure
    assert refused is not None
    assert "use_dora, which servers do not compute" in refused.message
    adapter_of(llama, tmp_path / "adapter", modules_to_save=["lm_head"])
    refused = ask(tmp_path, tmp_path / "base").failure
    assert refused is not None
    assert "has modules_to_save, which servers do not compute" in refused.message
    adapter_of(llama, tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file(load_file(path) | {"base_model.model.lm_head.weight": torch.zeros(2, 2)}, path)
    refused = ask(tmp_path, tmp_path / "base").failure
    assert refused is not None
    assert "lm_head.weight is neither A nor B of a module and would be lost" in refused.message
    saved = small_model("gpt_oss", **FAMILY["gpt_oss"])
    adapter_of(saved.model, tmp_path / "adapter", target_parameters=BOTH)
    refused = ask(tmp_path, saved.folder).failure
    assert refused is not None
    assert "routed experts of gpt_oss models cannot be written for each expert" in refused.message
    assert not (tmp_path / "plain").exists()
    assert not list(tmp_path.glob(".plain*"))


def test_numbers_that_the_wished_type_cannot_hold_are_refused(llama: Any, tmp_path: Path) -> None:
    adapter_of(llama, tmp_path / "adapter", lora_alpha=4096, use_rslora=True, r=1)
    path = tmp_path / "adapter" / "adapter_model.safetensors"

    save_file({name: tensor * 1e6 for name, tensor in load_file(path).items()}, path)
    refused = ask(tmp_path, tmp_path / "base", dtype="float16").failure
    assert refused is not None
    assert "torch.float16 cannot hold: give --dtype float32" in refused.message


@pytest.mark.parametrize(("down_rows", "outputs"), [(16, 12), (8, 13)])
def test_experts_that_do_not_belong_together_are_refused(
    tmp_path: Path, down_rows: int, outputs: int
) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text('{"model_type": "qwen3_moe"}')
    (tmp_path / "adapter").mkdir()
    lora = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_parameters": BOTH}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(lora))
    experts = "base_model.model.model.layers.0.mlp.experts"
    tensors = {
        f"{experts}.base_layer.lora_A.weight": torch.ones(8, 8),  # of two experts
        f"{experts}.base_layer.lora_B.weight": torch.ones(outputs, 8),
        f"{experts}.lora_A.weight": torch.ones(down_rows, 6),
        f"{experts}.lora_B.weight": torch.ones(8, down_rows),
    }
    save_file(tensors, tmp_path / "adapter" / "adapter_model.safetensors")
    refused = ask(tmp_path, tmp_path / "base").failure
    assert refused is not None
    assert "different numbers of experts, or of gate without up" in refused.message
