"""`mlora export --gguf`: what llama.cpp would add to its weights is what PEFT adds to the model's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor
from typer.testing import CliRunner

from mlora_operator.cli.app import app
from mlora_operator.cli.output import CommandError
from mlora_worker.commands.gguf_export import export
from mlora_worker.protocol import MergeAnswer, MergeQuestion

SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
PLACES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
ODD = {
    "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.down_proj": 6},
    "alpha_pattern": {"k_proj": 3, "q_proj": 5},
}


def make(config: Any, folder: Path, **lora: Any) -> tuple[Path, Path, dict[str, Any]]:
    """Folders of a base and of an adapter whose B is not zero, and what PEFT adds to each weight, by the module's name."""
    torch.manual_seed(5)
    base = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    base.save_pretrained(folder / "base")
    chosen = LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **lora})
    model = get_peft_model(base, chosen)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder / "adapter")
    deltas = {
        name.removeprefix("base_model.model."): module.get_delta_weight("default").detach().numpy()
        for name, module in model.named_modules()
        if hasattr(module, "get_delta_weight")
    }
    return folder / "base", folder / "adapter", deltas


def ask(adapter: Path, base: Path, output: Path, dtype: str | None = None) -> MergeAnswer:
    return export(MergeQuestion(adapter=str(adapter), base=str(base), output=str(output), dtype=dtype))  # type: ignore[arg-type]


def as_llama_cpp(path: Path, config: Any) -> tuple[dict[str, str], dict[str, Any]]:
    """The architecture and kinds, and what would be added to each weight; q and k of Llama in the order of transformers,
    put back by its own reader."""
    reader = GGUFReader(path)
    keys = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {tensor.name: tensor.data.astype(np.float32) for tensor in reader.tensors}
    back = LlamaTensorProcessor(
        config={key: getattr(config, key) for key in ("num_attention_heads", "num_key_value_heads")}
    )
    added = {}
    for name, a in tensors.items():
        if name.endswith(".lora_a"):
            weight = name.removesuffix(".lora_a")
            b = tensors[f"{weight}.lora_b"]
            product = keys["adapter.lora.alpha"] / b.shape[1] * (b @ a)
            if keys["general.architecture"] == "llama":
                product = back.process(product, weight).weights
            added[weight] = product
    assert len(tensors) == 2 * len(added)
    return {name: keys[name] for name in ("general.type", "adapter.type", "general.architecture")}, added


@pytest.mark.parametrize(
    ("config", "architecture", "lora"),
    [
        (LlamaConfig(**SMALL), "llama", {}),
        (LlamaConfig(**SMALL), "llama", ODD),
        (LlamaConfig(**SMALL), "llama", {"use_rslora": True, **ODD}),
        (MistralConfig(**SMALL), "llama", {}),
        (Qwen2Config(**SMALL), "qwen2", {"target_modules": ["q_proj", "down_proj"]}),
        (Qwen3Config(**SMALL), "qwen3", {}),
    ],
    ids=["llama", "patterns", "rslora", "mistral", "qwen2", "qwen3"],
)
def test_it_adds_what_peft_adds(config: Any, architecture: str, lora: dict[str, Any], tmp_path: Path) -> None:
    base, adapter, deltas = make(config, tmp_path, **lora)
    answer = ask(adapter, base, tmp_path / "bot.gguf")
    assert answer.failure is None
    assert answer.bytes == (tmp_path / "bot.gguf").stat().st_size
    kinds, added = as_llama_cpp(tmp_path / "bot.gguf", config)
    assert kinds == {"general.type": "adapter", "adapter.type": "lora", "general.architecture": architecture}
    wanted = {}
    for module, delta in deltas.items():
        _, _, layer, place = module.split(".", 3)
        wanted[f"blk.{layer}.{PLACES[place]}.weight"] = delta
    assert added.keys() == wanted.keys()
    for name, delta in wanted.items():
        np.testing.assert_allclose(added[name], delta, rtol=1e-5, atol=1e-6, err_msg=name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base", "bot.gguf"]


def test_half_precision_is_written_where_it_is_asked_for(tmp_path: Path) -> None:
    base, adapter, _ = make(LlamaConfig(**SMALL), tmp_path)
    assert ask(adapter, base, tmp_path / "half.gguf", "float16").dtype == "float16"
    assert {tensor.data.dtype for tensor in GGUFReader(tmp_path / "half.gguf").tensors} == {
        np.dtype("float16")
    }


@pytest.mark.parametrize(
    ("file", "change", "told"),
    [
        (
            "base/config.json",
            {"model_type": "gpt_neox"},
            "adapters of gpt_neox models cannot be written as GGUF",
        ),
        ("adapter/adapter_config.json", {"use_dora": True}, "has use_dora"),
        ("adapter/adapter_config.json", {"bias": "all"}, "has bias"),
        ("adapter/adapter_config.json", {"modules_to_save": ["lm_head"]}, "has modules_to_save"),
        (
            "adapter/adapter_config.json",
            {"peft_type": "IA3"},
            'has peft_type "IA3", and only LORA can be exported',
        ),
        ("bot.gguf", {}, "bot.gguf already exists"),
    ],
)
def test_what_has_no_form_in_gguf_is_refused(
    file: str, change: dict[str, Any], told: str, tmp_path: Path
) -> None:
    base, adapter, _ = make(LlamaConfig(**SMALL), tmp_path)
    path = tmp_path / file
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **change}))
    before = path.read_text()
    answer = ask(adapter, base, tmp_path / "bot.gguf")
    assert answer.failure is not None
    assert told in answer.failure.message
    assert (path.read_text(), len([*tmp_path.glob("*.gguf")])) == (before, file == "bot.gguf")


def test_the_command_writes_a_file_or_says_why_not(tmp_path: Path) -> None:
    base, adapter, _ = make(LlamaConfig(**SMALL), tmp_path)
    arguments = ["export", str(adapter), str(tmp_path / "bot.gguf"), "--base", str(base)]
    done = CliRunner().invoke(app, [*arguments, "--gguf"], catch_exceptions=False)
    assert (done.exit_code, "bot.gguf" in done.output) == (0, True)
    for more, told in (
        ([], "give exactly one of --merged, --gguf and --plain"),
        (["--merged", "--gguf"], "give exactly one of --merged, --gguf and --plain"),
    ):
        error = CliRunner().invoke(app, [*arguments, *more]).exception
        assert isinstance(error, CommandError)
        assert (told in str(error), error.exit_code) == (True, 2)
