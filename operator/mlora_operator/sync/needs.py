"""What a server must know to serve an adapter right, by the adapter's own files.

Servers load more than they compute: one that does not know ranks by module, or experts in one piece, takes the weights and
writes other text, without a word. So this is looked at before an adapter is offered.

| an adapter with | vLLM | SGLang 0.5.23 |
|---|---|---|
| ``use_rslora`` | right | scales by alpha / rank |
| ``rank_pattern``, ``alpha_pattern`` | right from 0.32 on; before, one for all modules | one for all modules |
| A and B of routed experts | right, or refused, from 0.32 on; before, misread by most models | not compared |
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIG_NAME, MANIFEST_NAME = "adapter_config.json", "manifest.json"
LARGEST = 2**20  # bytes of either
_SHOWN = 60  # characters of a version
_KIND = re.compile(r"\w{1,40}", re.ASCII)
# As in mlora_worker.protocol, which cannot be imported where only boto3 is installed.
EXPERTS = "experts"
STACKED = ("gate_up_proj", "down_proj")
# vLLM calls the block around their experts otherwise than transformers and PEFT, finds nothing there, and says nothing.
RENAMED_IN_VLLM = frozenset({"mixtral", "minimax_m2"})
# What PEFT takes for an expert's inputs are its outputs there, so A and B are in each other's place.
SWAPPED_IN_PEFT = frozenset({"llama4", "llama4_text"})
# The first vLLM that reads figures by module, and refuses experts in one piece where it would misread them.
_READS_ALL = (0, 32)
_OTHERWISE = "write it with `mlora export --plain`, or merge it with `--merged`"


@dataclass(frozen=True, slots=True)
class AdapterNeeds:
    """``stacked``: it has A and B of routed experts, in one piece for all experts of a layer. ``base_type``: the
    ``model_type`` of its base, where its manifest says that."""

    kind: str = "LORA"
    dora: bool = False
    oversized: bool = False  # a configuration that is not read, though a server would
    rslora: bool = False
    by_module: bool = False
    stacked: bool = False
    lone: str | None = None  # of the two parameters of experts, the one that has no other beside it
    base_type: str | None = None

    @property
    def unservable(self) -> str | None:
        """Why no server at all takes it."""
        if self.oversized:
            return (
                f"its {CONFIG_NAME} has more than {LARGEST:,} bytes, which is not read: write a smaller one"
            )
        if self.dora:
            return "it has use_dora, which servers do not compute: merge it with `mlora export --merged`"
        if self.kind != "LORA":
            return f"it is an adapter of the kind {self.kind}: merge it into its base with PEFT"
        if self.lone is not None:
            return f"it adapts experts.{self.lone} without the other of {' and '.join(STACKED)}: {_OTHERWISE}"
        return None


def needs_of(folder: Path) -> AdapterNeeds:
    """Of an adapter that was fetched. What cannot be read needs nothing: the server will say what is wrong with it."""
    config = _object(folder / CONFIG_NAME)
    kind = str(config.get("peft_type") or "LORA")
    parameters = config.get("target_parameters")
    blocks = _blocks(parameters if isinstance(parameters, list) else [])
    odd = [
        name for name, other in zip(STACKED, reversed(STACKED), strict=True) if blocks[name] - blocks[other]
    ]
    base_type = _object(folder / MANIFEST_NAME).get("baseModelType")
    return AdapterNeeds(
        kind=kind if _KIND.fullmatch(kind) else "unknown",
        dora=bool(config.get("use_dora")),
        oversized=_size(folder / CONFIG_NAME) > LARGEST,
        rslora=bool(config.get("use_rslora")),
        by_module=bool(config.get("rank_pattern") or config.get("alpha_pattern")),
        stacked=any(blocks.values()),
        lone=odd[0] if odd else None,
        base_type=base_type if isinstance(base_type, str) else None,
    )


def vllm_lacks(needs: AdapterNeeds, ask_version: Callable[[], str]) -> str | None:
    """Why a vLLM of this version must not get it."""
    if needs.stacked and needs.base_type in RENAMED_IN_VLLM:
        return f"vLLM would leave out what it adds to the experts of {needs.base_type}: {_OTHERWISE}"
    if needs.stacked and needs.base_type in SWAPPED_IN_PEFT:
        return f"vLLM would take A for B in the experts of {needs.base_type}: merge it with `mlora export --merged`"
    if not needs.stacked and not needs.by_module:
        return None
    version = ask_version()
    numbers = re.match(r"(\d{1,9})\.(\d{1,9})", version)
    if numbers is not None and (int(numbers[1]), int(numbers[2])) >= _READS_ALL:
        return None
    what = "adapters on routed experts" if needs.stacked else "ranks or alphas by module"
    this = f"this one is {version[:_SHOWN]}" if numbers is not None else "this one does not say its version"
    return (
        f"{what} need vLLM {'.'.join(map(str, _READS_ALL))} or newer, and {this}: upgrade it, or {_OTHERWISE}"
    )


def sglang_lacks(needs: AdapterNeeds, _: Callable[[], str]) -> str | None:
    """The same of SGLang, whose version makes no difference yet."""
    if needs.stacked:
        return f"how SGLang reads adapters on routed experts has not been compared: {_OTHERWISE}"
    if needs.by_module:
        return f"SGLang takes one rank and one alpha for all modules: {_OTHERWISE}"
    return (
        f"SGLang scales by alpha / rank, where rsLoRA has alpha / sqrt(rank): {_OTHERWISE}"
        if needs.rslora
        else None
    )


def _blocks(parameters: Sequence[Any]) -> Mapping[str, set[str]]:
    """For each of the two parameters of experts, the blocks whose experts have an adapter on it."""
    found: dict[str, set[str]] = {name: set() for name in STACKED}
    for path in parameters:
        block, _, name = str(path).rpartition(".")
        if name in found and block.rpartition(".")[2] == EXPERTS:
            found[name].add(block)
    return found


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _object(path: Path) -> Mapping[str, Any]:
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(LARGEST))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
