"""`mlora export --merged`: the merged model computes what base and adapter compute together, and is whole or not there."""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer
from typer.testing import CliRunner

from mlora_operator.cli.app import app
from mlora_worker.commands.merge import merge
from mlora_worker.protocol import AdapterManifest, ManifestFile, MergeAnswer, MergeQuestion
from mlora_worker.storage.object_store.scratch import sha256_of

IDS = torch.tensor([[3, 5, 8, 13, 21, 34]])


@pytest.fixture(scope="module")
def adapter(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_by_peft(tiny_model, tmp_path_factory.mktemp("adapter"))


def made_by_peft(tiny_model: Path, folder: Path, *, dora: bool = False) -> Path:
    """A PEFT adapter whose B is not zero."""
    torch.manual_seed(3)
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], use_dora=dora)
    model = get_peft_model(base, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
        if "lora_magnitude" in name:
            parameter.data.mul_(1 + torch.rand_like(parameter))
    model.save_pretrained(folder)
    return folder


def ask(adapter: Path, base: Path, output: Path, dtype: str | None = None) -> MergeAnswer:
    question = {"adapter": str(adapter), "base": str(base), "output": str(output), "dtype": dtype}
    return merge(MergeQuestion.model_validate(question))


def test_it_computes_what_base_and_adapter_compute(tiny_model: Path, adapter: Path, tmp_path: Path) -> None:
    answer = ask(adapter, tiny_model, tmp_path / "merged")
    assert answer.failure is None
    assert answer.bytes == sum(path.stat().st_size for path in (tmp_path / "merged").iterdir())
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    plain = base(IDS).logits
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    wanted = PeftModel.from_pretrained(base, adapter)(IDS).logits
    torch.testing.assert_close(merged(IDS).logits, wanted, rtol=1e-4, atol=1e-5)
    assert (wanted - plain).abs().max() > 1e-2
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").get_vocab()
    assert [path.name for path in tmp_path.iterdir()] == ["merged"]


def test_a_model_that_also_reads_images_is_merged_whole(small_model: Any) -> None:
    saved = small_model("mistral3")
    base, adapter = saved.folder / "base", saved.folder / "adapter"
    saved.model.save_pretrained(base)
    path = "model.language_model.layers.1.self_attn.q_proj"
    model = get_peft_model(copy.deepcopy(saved.model), LoraConfig(r=2, target_modules=[path]))
    torch.nn.init.normal_(model.get_submodule(f"base_model.model.{path}.lora_B.default").weight)
    model.save_pretrained(adapter)
    answer = ask(adapter, base, saved.folder / "merged")
    assert answer.failure is None
    merged = AutoModelForImageTextToText.from_pretrained(saved.folder / "merged", dtype=torch.float32)
    with torch.no_grad():
        wanted, plain = model(input_ids=IDS).logits, saved.model(input_ids=IDS).logits
        torch.testing.assert_close(merged(input_ids=IDS).logits, wanted, rtol=1e-4, atol=1e-5)
    assert (wanted - plain).abs().max() > 1e-2
    files = [load_file(folder / "model.safetensors") for folder in (base, saved.folder / "merged")]
    assert files[0].keys() == files[1].keys()


def test_dora_is_merged_with_its_magnitudes(tiny_model: Path, tmp_path: Path) -> None:
    adapter = made_by_peft(tiny_model, tmp_path / "dora", dora=True)
    assert ask(adapter, tiny_model, tmp_path / "merged").failure is None
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    wanted = PeftModel.from_pretrained(base, adapter)(IDS).logits
    torch.testing.assert_close(merged(IDS).logits, wanted, rtol=1e-4, atol=1e-5)


def test_the_sum_is_rounded_once_to_the_type_that_was_asked_for(
    tiny_model: Path, adapter: Path, tmp_path: Path
) -> None:
    exact = ask(adapter, tiny_model, tmp_path / "exact", "float32")
    rounded = ask(adapter, tiny_model, tmp_path / "rounded", "bfloat16")
    assert (exact.dtype, rounded.dtype) == ("float32", "bfloat16")
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("exact", "rounded"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name].bfloat16(), other[name]) for name in one)


def test_the_template_of_the_adapter_is_the_only_one(tiny_model: Path, adapter: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    shutil.copytree(adapter, own)
    (own / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert ask(own, tiny_model, tmp_path / "merged").failure is None
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False) == "Hi!"


def test_a_template_that_the_manifest_does_not_list_is_another_adapters(
    tiny_model: Path, adapter: Path, tmp_path: Path
) -> None:
    own = tmp_path / "own"
    shutil.copytree(adapter, own)
    files = [
        ManifestFile(name=path.name, bytes=path.stat().st_size, sha256=sha256_of(path))
        for path in own.iterdir()
    ]
    manifest = AdapterManifest(
        task_uid="u", namespace="n", name="a", fingerprint="f", base_model="m", step=1, loss=None, files=tuple(files)
    )  # fmt: skip
    (own / "manifest.json").write_text(manifest.model_dump_json(by_alias=True))
    (own / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert ask(own, tiny_model, tmp_path / "merged").failure is None
    template = AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template
    assert template == AutoTokenizer.from_pretrained(tiny_model).chat_template


def test_what_cannot_be_merged_leaves_nothing_and_says_why(
    tiny_model: Path, adapter: Path, tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(adapter, damaged)
    digest = hashlib.sha256(b"other").hexdigest()
    manifest = {
        "taskUid": "u", "namespace": "n", "name": "t", "fingerprint": "f", "baseModel": "m", "step": 1, "loss": None,
        "files": [{"name": "adapter_model.safetensors", "bytes": 1, "sha256": digest}],
    }  # fmt: skip
    (damaged / "manifest.json").write_text(json.dumps(manifest))
    foreign = tmp_path / "foreign"
    shutil.copytree(tiny_model, foreign)
    config = json.loads((foreign / "config.json").read_text())
    (foreign / "config.json").write_text(
        json.dumps({**config, "quantization_config": {"quant_method": "gptq"}})
    )
    there = tmp_path / "there"
    there.mkdir()
    out = tmp_path / "out"
    for one, base, output, told in (
        (tmp_path, tiny_model, out, "has no adapter_config.json and is not the folder of an adapter"),
        (adapter, tmp_path, out, "has no config.json and is not the folder of a base model"),
        (adapter, tiny_model, there, "already exists"),
        (damaged, tiny_model, out, "does not match the adapter's manifest: fetch it again"),
        (adapter, foreign, out, "the base model is quantised"),
    ):
        answer = ask(one, base, output)
        assert answer.failure is not None
        assert told in answer.failure.message
    assert not out.exists()
    assert not list(tmp_path.glob(".out*"))


def test_an_adapter_of_another_base_is_told(tiny_model: Path, adapter: Path, tmp_path: Path) -> None:
    wide = tmp_path / "wide"
    config = json.loads((tiny_model / "config.json").read_text()) | {"hidden_size": 32, "head_dim": 8}
    wide.mkdir()
    (wide / "config.json").write_text(json.dumps(config))
    AutoModelForCausalLM.from_config(_config_of(wide)).save_pretrained(wide)
    answer = ask(adapter, wide, tmp_path / "out")
    assert answer.failure is not None
    assert "the adapter belongs to another base model" in answer.failure.message


def _config_of(folder: Path) -> object:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder)


def test_the_command_says_what_it_did_and_what_is_missing(
    tiny_model: Path, adapter: Path, tmp_path: Path
) -> None:
    arguments = ["export", str(adapter), str(tmp_path / "merged"), "--base", str(tiny_model)]
    refused = CliRunner().invoke(app, arguments)
    assert "give exactly one of --merged" in str(refused.exception)
    done = CliRunner().invoke(app, [*arguments, "--merged", "--output", "json"])
    assert done.exit_code == 0, done.exception
    assert json.loads(done.stdout)["dtype"] == "float32"
    assert (tmp_path / "merged" / "model.safetensors").is_file()
