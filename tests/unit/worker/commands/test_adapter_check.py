"""A damaged adapter is named with its file, before PEFT or the library gguf breaks on it."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from typer.testing import CliRunner

from mlora_operator.cli.app import app
from mlora_worker.commands.gguf_export import export
from mlora_worker.commands.merge import merge
from mlora_worker.lora.peft_fields import unknown_field
from mlora_worker.protocol import MergeAnswer, MergeQuestion

A, B = (f"base_model.model.model.layers.0.self_attn.q_proj.lora_{one}.weight" for one in "AB")
M = "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector"
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
BASE = {"model_type": "llama", "num_attention_heads": 2, "num_hidden_layers": 1}
WEIGHTS = {A: torch.ones(2, 4), B: torch.ones(4, 2)}
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 3\n"
CUT_OFF = save(WEIGHTS)[:-10]


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    adapter, base = tmp_path / "adapter", tmp_path / "base"
    for folder in (adapter, base):
        folder.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps(CONFIG))
    (adapter / "adapter_model.safetensors").write_bytes(save(WEIGHTS))
    (base / "config.json").write_text(json.dumps(BASE))
    return adapter, base


Export = Callable[[MergeQuestion], MergeAnswer]


def told(run: Export, folders: tuple[Path, Path]) -> str:
    adapter, base = folders
    question = MergeQuestion(adapter=str(adapter), base=str(base), output=str(adapter.parent / "made"))
    answer = run(question)
    assert answer.failure is not None
    assert not (adapter.parent / "made").exists()
    return answer.failure.message


DAMAGED: list[tuple[str, Any, str]] = [
    ("adapter_model.safetensors", None, "has no adapter_model.safetensors: fetch the adapter again"),
    ("adapter_model.safetensors", b"", "adapter_model.safetensors has 0 bytes and is not a safetensors file"),
    ("adapter_model.safetensors", CUT_OFF, "adapter_model.safetensors is truncated"),
    ("adapter_model.safetensors", POINTER, "adapter_model.safetensors is a pointer of Git LFS"),
    ("adapter_model.safetensors", b"\x10" + bytes(7) + b"x" * 16, "no valid safetensors header"),
    ("adapter_model.safetensors", save({}), "adapter_model.safetensors holds no tensors"),
    ("adapter_model.safetensors", save({A: torch.ones(2, 4)}), "and not its lora_B: it is not whole"),
    ("adapter_model.safetensors", save({B: torch.ones(4, 2)}), "and not its lora_A: it is not whole"),
    (
        "adapter_model.safetensors",
        save({A: torch.ones(3, 4), B: torch.ones(4, 2)}),
        "has rank 3, its lora_B 2",
    ),
    (
        "adapter_model.safetensors",
        save({A: torch.ones(4), B: torch.ones(4, 2)}),
        "shape [4], and is not a matrix",
    ),
    ("adapter_model.safetensors", save({A: torch.ones(0, 4), B: torch.ones(4, 0)}), "is not a matrix"),
    (
        "adapter_config.json",
        {**CONFIG, "use_dora": True},
        "lacks base_model.model.model.layers.0.self_attn.q_proj",
    ),
    (
        "adapter_model.safetensors",
        save(WEIGHTS | {M: torch.ones(4)}),
        "has use_dora false, and adapter_model.safetensors has base",
    ),
    ("adapter_config.json", {**CONFIG, "peft_type": "VERA"}, "merge this one with PEFT's merge_and_unload"),
    ("adapter_config.json", b"", "adapter_config.json is not JSON"),
    ("adapter_config.json", b"[1]", "adapter_config.json is not a JSON object"),
    ("adapter_config.json", b'{"peft_type": "LORA", "r"', "adapter_config.json is not JSON"),
    ("adapter_config.json", b"<!doctype html><html>", "adapter_config.json is a web page"),
    ("adapter_config.json", {}, "adapter_config.json has no peft_type"),
    ("adapter_config.json", {**CONFIG, "r": 0}, "adapter_config.json has r 0, which is not a number above 0"),
    ("adapter_config.json", {**CONFIG, "r": "2"}, 'adapter_config.json has r "2"'),
    ("adapter_config.json", {"peft_type": "LORA", "r": 2}, "adapter_config.json has lora_alpha null"),
    ("adapter_config.json", {**CONFIG, "alpha_pattern": [1]}, "alpha_pattern that is not an object"),
    ("adapter_config.json", {**CONFIG, "rank_pattern": {"q_proj": None}}, "has q_proj null"),
    (
        "adapter_config.json",
        {**CONFIG, "peft_type": "XLORA", "adapters": {"0": "owner/name"}},
        'has peft_type "XLORA"',
    ),
    (
        "adapter_config.json",
        {**CONFIG, "adapters": {"0": "owner/name"}},
        'has adapters {"0": "owner/name"}, which is not',
    ),
    ("adapter_config.json", {**CONFIG, "megatron_config": {"a": 1}}, "has megatron_config"),
    ("adapter_config.json", {**CONFIG, "megatron_core": "mymodule"}, 'has megatron_core "mymodule"'),
    ("base/config.json", b"{", "config.json is not JSON"),
    ("base/config.json", POINTER, "config.json is a pointer of Git LFS"),
]


@pytest.mark.parametrize(("name", "content", "words"), DAMAGED, ids=range(len(DAMAGED)))
@pytest.mark.parametrize("run", [merge, export], ids=["merged", "gguf"])
def test_a_damaged_file_is_named(
    folders: tuple[Path, Path], run: Export, name: str, content: Any, words: str
) -> None:
    path = folders[1] / "config.json" if name.startswith("base") else folders[0] / name
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    assert words in told(run, folders)
    assert path.name in told(run, folders)


def test_a_base_without_its_figures_is_named(folders: tuple[Path, Path]) -> None:
    (folders[1] / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert "config.json has num_attention_heads null" in told(export, folders)


def test_weights_of_a_base_that_break_the_library_are_no_traceback(folders: tuple[Path, Path]) -> None:
    (folders[1] / "model.safetensors").write_bytes(CUT_OFF)
    assert f"{folders[1]} or {folders[0]} cannot be read" in told(merge, folders)


def test_what_peft_writes_of_a_plain_adapter_is_known() -> None:
    peft = pytest.importorskip("peft")
    written = {
        name: sorted(value) if isinstance(value, set) else value
        for name, value in peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
        .to_dict()
        .items()
    }
    assert unknown_field(written) is None


@pytest.mark.parametrize("way", ["--merged", "--gguf"])
def test_the_libraries_ask_no_hub(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    given: dict[str, str] = {}

    def asked(_: MergeQuestion, environment: dict[str, str], **__: object) -> MergeAnswer:
        given.update(environment)
        return MergeAnswer(bytes=1, dtype="float32")

    monkeypatch.setattr("mlora_operator.cli.export.merge", asked)
    arguments = ["export", str(folders[0]), str(folders[0].parent / "made"), "--base", str(folders[1]), way]
    assert CliRunner().invoke(app, arguments, catch_exceptions=False).exit_code == 0
    assert (given["HF_HUB_OFFLINE"], given["TRANSFORMERS_OFFLINE"]) == ("1", "1")
