"""``python -m mlora_worker.commands.gguf_export``: a fetched adapter as one GGUF file, for llama.cpp and its kin.

Reads a ``MergeQuestion`` as JSON from standard input (``output`` is the file to make) and writes a ``MergeAnswer`` to
standard output. Of the base its configuration alone is read. Names of tensors and keys are those of the library ``gguf``,
which belongs to llama.cpp; the form is that of its ``convert_lora_to_gguf.py``:

1. ``general.type`` is ``adapter``, ``adapter.type`` is ``lora``, ``general.architecture`` is the base's, and a linear
   module ``blk.N.attn_q.weight`` has ``.lora_a`` [rank, in] and ``.lora_b`` [out, rank].
2. llama.cpp scales B A by ``adapter.lora.alpha`` / rank, with one alpha for all. Where PEFT's scale is another one
   (rsLoRA, alphas by module), B is multiplied by what is missing.
3. Llama's files have the rows of q and k in another order, for a rotation of neighbours instead of halves; so has B there.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from mlora_worker.commands.adapter_check import UnusableAdapter, json_object, positive
from mlora_worker.commands.merge import check_folders, failure
from mlora_worker.commands.scales import scale_of
from mlora_worker.commands.stdio import reply
from mlora_worker.protocol import MergeAnswer, MergeQuestion
from mlora_worker.storage.artifacts.adapter import CONFIG_NAME, WEIGHTS_NAME

Array = NDArray[Any]

# Model type of transformers to llama.cpp's architecture, and whether its files have q and k in their own order.
_ARCHITECTURES = {
    "llama": ("LLAMA", True),
    "mistral": ("LLAMA", True),
    "qwen2": ("QWEN2", False),
    "qwen3": ("QWEN3", False),
}
_LORA_A, _LORA_B = ".lora_A.weight", ".lora_B.weight"
_PREFIX = "base_model.model."


def main() -> None:
    reply("mlora_worker.commands.gguf_export", MergeQuestion, export)


def export(question: MergeQuestion) -> MergeAnswer:
    """Never raises for what is wrong with the folders: that is the answer."""
    adapter, base, target = Path(question.adapter), Path(question.base), Path(question.output)
    try:
        if importlib.util.find_spec("gguf") is None:
            raise UnusableAdapter("the library gguf is not installed: pip install 'mlora-operator[gguf]'")
        check_folders(adapter, base, target)
        if question.dtype == "bfloat16":
            raise UnusableAdapter("adapters in GGUF must be float32 or float16")
        target.parent.mkdir(parents=True, exist_ok=True)
        # Beside the target, so that it comes to its name whole or not at all.
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as held:
            made = Path(held) / "adapter.gguf"
            _write(adapter, base, made, question.dtype or "float32")
            size = made.stat().st_size
            made.rename(target)
    except UnusableAdapter as error:
        return failure(str(error))
    except Exception as error:  # damaged weights break the libraries anywhere, with any error
        return failure(f"{base} or {adapter} cannot be read: {type(error).__name__}: {str(error)[:1000]}")
    return MergeAnswer(bytes=size, dtype=question.dtype or "float32")


def _write(adapter: Path, base: Path, made: Path, dtype: str) -> None:
    from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGUFType, GGUFWriter, Keys, get_tensor_name_map

    shape = _base_shape(base)
    architecture = MODEL_ARCH[shape.architecture]
    names = get_tensor_name_map(architecture, shape.layers)
    config = json_object(adapter / CONFIG_NAME)
    _check_kind(config)
    writer = GGUFWriter(made, MODEL_ARCH_NAMES[architecture])
    writer.add_type(GGUFType.ADAPTER)
    writer.add_string(Keys.Adapter.TYPE, "lora")
    writer.add_float32(Keys.Adapter.LORA_ALPHA, float(config["lora_alpha"]))
    for module, a, b in _products(load_file(adapter / WEIGHTS_NAME), config):
        name = names.get_name(f"{module}.weight", try_suffixes=(".weight",))
        if name is None:
            raise UnusableAdapter(
                f"GGUF has no name for {module} in a model of architecture {shape.architecture}"
            )
        if shape.permuted and module.endswith(("q_proj", "k_proj")):
            b = as_llama_orders(b, shape.heads if module.endswith("q_proj") else shape.key_heads)
        writer.add_tensor(f"{name}.lora_a", np.ascontiguousarray(a.astype(dtype)))
        writer.add_tensor(f"{name}.lora_b", np.ascontiguousarray(b.astype(dtype)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@dataclass(frozen=True, slots=True)
class _BaseShape:
    architecture: str
    permuted: bool
    layers: int
    heads: int
    key_heads: int


def _base_shape(base: Path) -> _BaseShape:
    config = json_object(base / "config.json")
    kind = config.get("model_type")
    if kind not in _ARCHITECTURES:
        raise UnusableAdapter(
            f"adapters of {kind} models cannot be written as GGUF, only those of {', '.join(_ARCHITECTURES)}: merge "
            f"it into "
            "its base with --merged, and convert the merged model with llama.cpp's convert_hf_to_gguf.py"
        )
    for name in ("num_attention_heads", "num_hidden_layers"):
        positive(base / "config.json", config, name)
    heads = int(config["num_attention_heads"])
    key_heads = int(config.get("num_key_value_heads") or heads)
    return _BaseShape(*_ARCHITECTURES[kind], int(config["num_hidden_layers"]), heads, key_heads)


def _check_kind(config: Mapping[str, Any]) -> None:
    for name, plain in (
        ("use_dora", False),
        ("bias", "none"),
        ("modules_to_save", None),
        ("fan_in_fan_out", False),
    ):
        if config.get(name, plain) != plain:
            raise UnusableAdapter(
                f"the adapter has {name}, which GGUF does not support: merge it into its base with --merged"
            )


def _products(
    tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]
) -> Iterator[tuple[str, Array, Array]]:
    """Module, A and B in float32, so that alpha / rank x B A is what PEFT adds to its weight. Raises UnusableAdapter."""
    for key, a in tensors.items():
        if not key.endswith(_LORA_A):
            if not key.endswith(_LORA_B):
                raise UnusableAdapter(f"{key} does not belong to a LoRA adapter of linear modules")
            continue
        module = key.removeprefix(_PREFIX).removesuffix(_LORA_A)
        b = tensors[key.removesuffix(_LORA_A) + _LORA_B]
        rank, whole = a.shape[0], float(config["lora_alpha"])
        missing = scale_of(config, module, rank) * rank / whole
        yield module, a.float().numpy(), (b.float() * missing).numpy()


def as_llama_orders(rows: Array, heads: int) -> Array:
    """Of each head, the rows i and i + half side by side: [heads x 2 x half, ...] to [heads x half x 2, ...]."""
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, 2, half, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


if __name__ == "__main__":
    main()
