"""``python -m mlora_worker.commands.plain_export``: a fetched adapter as every server of adapters computes it right.

Reads a ``MergeQuestion`` as JSON from standard input (``output`` is the folder to make) and writes a ``MergeAnswer`` to
standard output. Of the base its configuration alone is read. What is added to each weight stays as it is:

1. All modules get the largest rank, by rows of zeros in A and columns of zeros in B, and one alpha; B is multiplied by what
   is missing (rsLoRA, alphas by module).
2. A and B of routed experts, in PEFT one piece for a layer, become those of each expert's own gate, up and down, under
   the names that vLLM has for them. Gate and up get the same A. Where one of the two parameters had none, there are zeros.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mlora_worker.commands.adapter_check import UnusableAdapter, json_object
from mlora_worker.commands.merge import written_whole
from mlora_worker.commands.scales import rank_of, scale_of
from mlora_worker.commands.stdio import reply
from mlora_worker.protocol import (
    EXPERTS,
    MANIFEST_NAME,
    STACKED,
    AdapterManifest,
    ManifestFile,
    MergeAnswer,
    MergeQuestion,
)
from mlora_worker.storage.artifacts.adapter import (
    CONFIG_NAME,
    TEMPLATE_NAME,
    WEIGHTS_NAME,
    written_manifest,
)
from mlora_worker.storage.object_store.scratch import sha256_of
from mlora_worker.storage.versioned_json import read_document

_A, _B = ".lora_A.weight", ".lora_B.weight"
_PREFIX = "base_model.model."
_GATE_UP, _DOWN = STACKED


@dataclass(frozen=True, slots=True)
class _Names:
    """How vLLM calls the block around a type's experts, where not as transformers does, and the matrices of one."""

    block: str | None = None
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


# Those that are compared with PEFT (tests/consumers/test_experts.py).
_NAMES = {
    "qwen3_moe": _Names(),
    "olmoe": _Names(),
    "granitemoe": _Names(),
    "mixtral": _Names("block_sparse_moe", "w1", "w3", "w2"),
}


@dataclass(frozen=True, slots=True)
class _Product:
    """What is added to a module's weight is ``scale`` x B A."""

    module: str
    a: Tensor
    b: Tensor
    scale: float


def main() -> None:
    reply("mlora_worker.commands.plain_export", MergeQuestion, export)


def export(question: MergeQuestion) -> MergeAnswer:
    """Never raises for what is wrong with the folders: that is the answer."""
    return written_whole(question, _write)


def _write(adapter: Path, base: Path, made: Path, wished: str | None, listed: Collection[str]) -> str:
    dtype = _write_plain(adapter, base, made, wished)
    if TEMPLATE_NAME in listed and (adapter / TEMPLATE_NAME).is_file():
        shutil.copyfile(adapter / TEMPLATE_NAME, made / TEMPLATE_NAME)
    _write_manifest(adapter, made)
    return dtype


def _write_plain(adapter: Path, base: Path, made: Path, wished: str | None) -> str:
    """Weights and configuration; the type of the numbers."""
    config = json_object(adapter / CONFIG_NAME)
    for name, nothing in (("use_dora", False), ("bias", "none"), ("modules_to_save", None)):
        if config.get(name) not in (None, nothing, []):
            raise UnusableAdapter(
                f"the adapter has {name}, which servers do not compute: merge it into its base with --merged"
            )
    tensors = load_file(adapter / WEIGHTS_NAME)
    products = list(_products(tensors, config, json_object(base / "config.json")))
    rank = max(product.a.shape[0] for product in products)
    alpha = float(config["lora_alpha"])
    alpha = alpha if alpha.is_integer() else float(rank)
    dtype = getattr(torch, wished) if wished is not None else next(iter(tensors.values())).dtype
    written: dict[str, Tensor] = {}
    for product in products:
        padding = (0, rank - product.a.shape[0])
        missing = product.scale * rank / alpha
        a = torch.nn.functional.pad(product.a, (0, 0, *padding))
        b = torch.nn.functional.pad(product.b.float() * missing, padding)
        for name, tensor in ((_A, a), (_B, b)):
            cast = tensor.to(dtype, copy=True).contiguous()  # gate and up share an A, which no file may
            if not bool(torch.isfinite(cast).all()):
                raise UnusableAdapter(
                    f"{product.module} has numbers that {dtype} cannot hold: give --dtype float32"
                )
            written[f"{_PREFIX}{product.module}{name}"] = cast
    save_file(written, made / WEIGHTS_NAME, metadata={"format": "pt"})
    kept = ("base_model_name_or_path", "revision", "task_type", "peft_type", "fan_in_fan_out", "lora_dropout")
    plain = {name: config[name] for name in kept if name in config}
    plain |= {
        "r": rank,
        "lora_alpha": int(alpha),
        "target_modules": sorted({product.module.rpartition(".")[2] for product in products}),
        "bias": "none",
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
    }
    (made / CONFIG_NAME).write_text(json.dumps(plain, indent=2) + "\n")
    return str(dtype).removeprefix("torch.")


def _products(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], base: Mapping[str, Any]
) -> Iterator[_Product]:
    """Raises UnusableAdapter."""
    stacked: dict[str, dict[str, tuple[Tensor, Tensor]]] = {}
    for key, a in tensors.items():
        if not key.endswith(_A):
            if not key.endswith(_B):
                raise UnusableAdapter(
                    f"{key} is neither A nor B of a module and would be lost: merge the adapter into its base with --merged"
                )
            continue
        b = tensors[key.removesuffix(_A) + _B]
        module = key.removeprefix(_PREFIX).removesuffix(_A)
        block = module.removesuffix(".base_layer")
        if block.rpartition(".")[2] != EXPERTS:
            rank = a.shape[0]
            yield _Product(module, a, b, scale_of(config, module, rank))
            continue
        stacked.setdefault(block, {})[_parameter(module, tensors, config)] = (a, b)
    for block, pairs in stacked.items():
        yield from _of_experts(block, pairs, config, str(base.get("model_type")))


def _parameter(module: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> str:
    """Which of the two it is. Where both have an adapter, PEFT wraps down around gate and up; the name of a lone one does
    not say which it is, and the configuration does."""
    if module.endswith(".base_layer"):
        return _GATE_UP
    if f"{_PREFIX}{module}.base_layer{_A}" in tensors:
        return _DOWN
    named = [
        name
        for name in STACKED
        if any(f".{module}.{name}".endswith(f".{path}") for path in config.get("target_parameters") or ())
    ]
    if len(named) != 1:
        raise UnusableAdapter(
            f"{CONFIG_NAME} does not say which parameter of {module} is adapted: fetch the adapter again"
        )
    return named[0]


def _of_experts(
    block: str, pairs: Mapping[str, tuple[Tensor, Tensor]], config: Mapping[str, Any], model_type: str
) -> Iterator[_Product]:
    """Of each expert, gate, up and down. A is [experts x rank, in], B [out, rank x experts], the expert last."""
    names = _NAMES.get(model_type)
    if names is None:
        raise UnusableAdapter(
            f"adapters on routed experts of {model_type} models cannot be written for each expert, only those of "
            f"{', '.join(_NAMES)}: serve it as it is, or merge it into its base with --merged"
        )
    whole = {name: _split(f"{block}.{name}", *pair, config) for name, pair in pairs.items()}
    there = next(iter(whole.values()))
    unequal = any(len(each) != len(there) for each in whole.values())
    if unequal or (_GATE_UP in whole and whole[_GATE_UP][0].b.shape[0] % 2):
        raise UnusableAdapter(
            f"{block} has A and B of different numbers of experts, or of gate without up: fetch the adapter again"
        )
    experts, rank = len(there), there[0].a.shape[0]
    hidden, width = _sides(whole)
    if names.block is not None:
        parent, _, _ = block.removesuffix(f".{EXPERTS}").rpartition(".")
        block = f"{parent}.{names.block}.{EXPERTS}"

    def nothing(inputs: int, outputs: int) -> list[_Product]:
        return [_Product("", torch.zeros(rank, inputs), torch.zeros(outputs, rank), 1.0)] * experts

    gate_up = whole.get(_GATE_UP) or nothing(hidden, 2 * width)
    down = whole.get(_DOWN) or nothing(width, hidden)
    for expert in range(experts):
        place = f"{block}.{expert}"
        both, back = gate_up[expert], down[expert]
        gate, up = both.b.chunk(2)
        yield _Product(f"{place}.{names.gate}", both.a, gate, both.scale)
        yield _Product(f"{place}.{names.up}", both.a, up, both.scale)
        yield _Product(f"{place}.{names.down}", back.a, back.b, back.scale)


def _split(path: str, a: Tensor, b: Tensor, config: Mapping[str, Any]) -> list[_Product]:
    """Of each expert, A [rank, in] and B [out, rank]. Raises UnusableAdapter."""
    rank = rank_of(config, path)
    if a.shape[0] % rank:
        raise UnusableAdapter(f"{path} has {a.shape[0]} rows of A, which are not of whole ranks of {rank}")
    experts = a.shape[0] // rank
    each_a, each_b = a.reshape(experts, rank, -1), b.reshape(b.shape[0], rank, experts)
    scale = scale_of(config, path, rank)
    return [_Product(path, each_a[one], each_b[..., one], scale) for one in range(experts)]


def _sides(whole: Mapping[str, list[_Product]]) -> tuple[int, int]:
    """Hidden size and the width of an expert."""
    if _GATE_UP in whole:
        both = whole[_GATE_UP][0]
        return both.a.shape[1], both.b.shape[0] // 2
    back = whole[_DOWN][0]
    return back.b.shape[0], back.a.shape[1]


def _write_manifest(adapter: Path, made: Path) -> None:
    """As of the same task, so that ``mlora fetch`` and ``mlora sync`` take it from wherever it is copied to."""
    former = adapter / MANIFEST_NAME
    if not former.is_file():
        return
    files = tuple(
        ManifestFile(name=path.name, bytes=path.stat().st_size, sha256=sha256_of(path))
        for path in sorted(made.iterdir())
    )
    manifest = read_document(AdapterManifest, former.read_bytes())
    plain = manifest.model_copy(update={"files": files, "base_model_type": None})
    (made / MANIFEST_NAME).write_bytes(written_manifest(plain))


if __name__ == "__main__":
    main()
