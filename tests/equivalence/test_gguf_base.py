"""The lines by which the page *Models* converts a base model from GGUF give the model that the file holds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, TokenType, get_tensor_name_map, quants
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from mlora_worker.commands.gguf_export import as_llama_orders
from mlora_worker.protocol import ModelSource, StorageAccess
from mlora_worker.storage.base_model.model_source import ModelFiles
from mlora_worker.storage.object_store.store import open_store

PAGE = Path(__file__).parents[2] / "docs" / "users" / "models.md"
TOKENS = ["<s>", "</s>", *"abcdefgh", "ab", "cd"]
SMALL: dict[str, Any] = {
    "vocab_size": len(TOKENS), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip


def write_gguf(model: LlamaForCausalLM, path: Path) -> dict[str, torch.Tensor]:
    """What is left of the weights once their matrices were quantised; q and k in the order of the file."""
    config = model.config
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([TokenType.CONTROL] * 2 + [TokenType.NORMAL] * (len(TOKENS) - 2))
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    quantised = GGMLQuantizationType.Q4_1
    held = {}
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        values = tensor.numpy()
        if name.endswith("q_proj.weight"):
            values = as_llama_orders(values, config.num_attention_heads)
        elif name.endswith("k_proj.weight"):
            values = as_llama_orders(values, config.num_key_value_heads)
        place = names.get_name(name, try_suffixes=(".weight",))
        if values.ndim == 2:
            packed = quants.quantize(values, quantised)
            writer.add_tensor(place, packed, raw_dtype=quantised)
            tensor = torch.from_numpy(quants.dequantize(packed, quantised))
        else:
            writer.add_tensor(place, values.copy())
        held[name] = tensor
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def test_the_converted_model_is_the_one_in_the_file(tmp_path: Path) -> None:
    torch.manual_seed(7)
    model = LlamaForCausalLM(LlamaConfig(**SMALL)).eval()
    held = write_gguf(model, tmp_path / "model.gguf")
    (lines,) = re.findall(r"## GGUF\n.*?```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    lines = lines.replace('"FOLDER"', repr(str(tmp_path))).replace(
        '"NEW_FOLDER"', repr(str(tmp_path / "made"))
    )
    exec(compile(lines, str(PAGE), "exec"), {})

    store = open_store(StorageAccess(), allow_files=True)
    source = ModelSource(name="m", uri=(tmp_path / "made").as_uri())
    files = ModelFiles(store, source, tmp_path / "cache")
    assert files.names() == held.keys()
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    for name in files.names():
        found, module = files.tensor(name), name.split(".")[-2]
        if module in heads:
            found = torch.from_numpy(as_llama_orders(found.float().numpy(), heads[module])).bfloat16()
        assert torch.equal(found, held[name].bfloat16()), name
    assert AutoTokenizer.from_pretrained(files.folder()).get_vocab().keys() >= set(TOKENS)
