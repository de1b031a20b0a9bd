"""A task that goes on from another adapter: its PEFT folder read, compared with the task's own shape, cut for stages."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from mlora_worker.coordinator.preparation.expected_tensors import expected_tensors
from mlora_worker.coordinator.task.prepared import InitialState
from mlora_worker.lora.peft_fields import unknown_field
from mlora_worker.protocol import FailureReason, LoRAConfig
from mlora_worker.storage.artifacts.adapter import CONFIG_NAME, WEIGHTS_NAME, find_published
from mlora_worker.storage.errors import ObjectNotFound, StorageError, TooLarge
from mlora_worker.storage.object_store.store import Store
from mlora_worker.storage.uri import join
from mlora_worker.storage.versioned_json import plain_json
from mlora_worker.stream.targets import Target

_SHOWN = 100  # characters of a value
_NAMED = 3  # tensors that a message names
_LARGEST_CONFIG = 2**20  # bytes; also what names and shapes may take beside the weights
_WIDEST = 8  # bytes of a number in the file: float64
# Starts that change the base's weights, too, so that the adapter fits none that is as it was.
_PLAIN_STARTS = (None, True, False, "gaussian", "orthogonal", "eva")


class UnfitAdapter(Exception):
    """The adapter at ``initFrom.uri`` is none that this task could go on from; the message says in what they differ."""

    reason = FailureReason.INVALID_SPEC


@dataclass(frozen=True, slots=True)
class InitialAdapter:
    state: InitialState
    sha256: str  # of the weights' file: it decides what the task becomes


def read_initial(store: Store, uri: str, lora: LoRAConfig, targets: Sequence[Target]) -> InitialAdapter:
    """The adapter in the PEFT folder ``uri``. ``targets``: the modules of the whole model that the task adapts.

    Raises StorageError, and ``UnfitAdapter`` for one of another shape. Its dropout and its base model's name are not
    compared: the one may be changed at will, the other is spelt in many ways.
    """
    _check_config(_read_config(store, uri), lora, uri)
    wanted = expected_tensors(targets)
    numbers = sum(map(math.prod, wanted.values()))
    data = _read(store, join(uri, WEIGHTS_NAME), _LARGEST_CONFIG + _WIDEST * numbers)
    digest = hashlib.sha256(data).hexdigest()
    manifest = find_published(store, uri)
    if manifest is not None and digest not in {file.sha256 for file in manifest.files}:
        raise UnfitAdapter(f"initFrom.uri: {WEIGHTS_NAME} below {uri} does not match its manifest")
    try:
        tensors = load_safetensors(data)
    except SafetensorError as error:
        raise UnfitAdapter(f"initFrom.uri: {WEIGHTS_NAME} below {uri} cannot be read: {error}") from None
    _check_tensors(tensors, wanted, uri)
    parts: dict[int, dict[str, Tensor]] = {target.module.stage: {} for target in targets}
    for target in targets:
        for name in expected_tensors([target]):
            parts[target.module.stage][name] = tensors[name].float()
    payloads = {stage: save_safetensors(part) for stage, part in parts.items() if stage > 0}
    return InitialAdapter(InitialState(parts.get(0, {}), payloads), digest)


def _read(store: Store, uri: str, most: int) -> bytes:
    try:
        return store.read(uri, most)
    except TooLarge:
        raise UnfitAdapter(
            f"initFrom.uri: {uri} has more bytes than an adapter of this task's shape can have ({most})"
        ) from None


def _read_config(store: Store, uri: str) -> dict[str, Any]:
    try:
        found = plain_json(_read(store, join(uri, CONFIG_NAME), _LARGEST_CONFIG))
    except ObjectNotFound:
        raise StorageError(
            FailureReason.INVALID_SPEC,
            f"initFrom.uri: {uri} contains no {CONFIG_NAME}: give the folder of a PEFT adapter",
        ) from None
    except ValueError as error:
        raise UnfitAdapter(f"initFrom.uri: {CONFIG_NAME} below {uri} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise UnfitAdapter(f"initFrom.uri: {CONFIG_NAME} below {uri} is not a JSON object")
    return found


def _check_config(config: Mapping[str, Any], lora: LoRAConfig, uri: str) -> None:
    wanted: dict[str, tuple[Any, Any]] = {  # PEFT's name -> what it must be, and what it is when it is absent
        "peft_type": ("LORA", "LORA"),
        "r": (lora.rank, None),
        "lora_alpha": (lora.alpha, None),
        "use_rslora": (lora.use_rslora, False),
        "rank_pattern": (dict(lora.rank_pattern), {}),
        "alpha_pattern": (dict(lora.alpha_pattern), {}),
        "bias": ("none", "none"),
        "modules_to_save": (None, None),
        "use_dora": (lora.use_dora, False),
    }
    for name, (mine, absent) in wanted.items():
        found = config.get(name, absent)
        if (found or absent) != mine:
            raise UnfitAdapter(
                f"initFrom.uri: the adapter at {uri} has {name} {json.dumps(found)}, the task {json.dumps(mine)}; "
                f"they "
                "must be the same"
            )
    unknown = unknown_field(config)
    if unknown is not None:
        raise UnfitAdapter(
            f"initFrom.uri: the adapter at {uri} has {unknown} {json.dumps(config[unknown])[:_SHOWN]}, which is not "
            f"supported because it may change the result: use an adapter of plain LoRA"
        )
    start = config.get("init_lora_weights")
    if start not in _PLAIN_STARTS:
        raise UnfitAdapter(
            f"initFrom.uri: the adapter at {uri} has init_lora_weights {json.dumps(start)}, which also changed its "
            f"base model's weights: use an adapter of an unchanged base model; or, on a pipeline of the changed base, set "
            f"init_lora_weights to true there"
        )


def _check_tensors(tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]], uri: str) -> None:
    flaws = {
        "lacks": sorted(expected.keys() - tensors.keys()),
        "has, and the task's modules do not,": sorted(tensors.keys() - expected.keys()),
        "has in another shape": sorted(
            name for name in expected.keys() & tensors.keys() if tuple(tensors[name].shape) != expected[name]
        ),
        "has with values that are not finite numbers": sorted(
            name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())
        ),
    }
    for flaw, names in flaws.items():
        if names:
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            raise UnfitAdapter(
                f"initFrom.uri: the adapter at {uri} {flaw} {', '.join(names[:_NAMED])}{more}; lora.targetModules, "
                f"rank "
                "and the base model must be those that it was trained with"
            )
