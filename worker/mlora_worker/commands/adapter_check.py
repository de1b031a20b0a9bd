"""Whether a folder holds a PEFT adapter that is whole. What is wrong is told with its file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlora_worker.lora.peft_fields import unknown_field
from mlora_worker.storage.artifacts.adapter import CONFIG_NAME, WEIGHTS_NAME
from mlora_worker.storage.base_model.safetensors_reader import BrokenModel, TensorEntry, read_header
from mlora_worker.storage.errors import StorageError
from mlora_worker.storage.first_bytes import ENOUGH, named
from mlora_worker.storage.object_store.file_store import FileStore
from mlora_worker.storage.versioned_json import plain_json

_A, _B = ".lora_A.weight", ".lora_B.weight"
_MAGNITUDE = ".lora_magnitude_vector"
_AGAIN = "fetch the adapter again"
_SHOWN = 100  # characters of a value


class UnusableAdapter(Exception):
    """Why there is nothing to export, and what to do."""


def check_adapter(folder: Path) -> None:
    """Reads the configuration, and of the weights the header. Raises UnusableAdapter."""
    config = json_object(folder / CONFIG_NAME)
    _check_config(folder / CONFIG_NAME, config)
    path = folder / WEIGHTS_NAME
    if not path.is_file():
        pickled = (
            " (adapter_model.bin is a pickle, which is not read)"
            if (folder / "adapter_model.bin").exists()
            else ""
        )
        raise UnusableAdapter(
            f"{folder} has no {WEIGHTS_NAME}{pickled}: {_AGAIN}, or save it with safetensors"
        )
    try:
        entries = read_header(FileStore(), path.absolute().as_uri())
    except BrokenModel as error:
        raise UnusableAdapter(str(error).replace(path.absolute().as_uri(), str(path))) from None
    except StorageError as error:
        raise UnusableAdapter(f"{path} cannot be read: {error}") from None
    if not entries:
        raise UnusableAdapter(f"{path} holds no tensors: {_AGAIN}")
    _check_pairs(path, entries)
    _check_magnitudes(path, entries, bool(config.get("use_dora")))


def json_object(path: Path) -> dict[str, Any]:
    """Raises UnusableAdapter, also for a number without a value."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UnusableAdapter(f"{path} cannot be read: {error.strerror or error}") from None
    found = named(data[:ENOUGH])
    if found is not None:
        raise UnusableAdapter(f"{path} {found}")
    try:
        made = plain_json(data)
    except ValueError as error:
        raise UnusableAdapter(f"{path} is not JSON ({error}): it is damaged; {_AGAIN}") from None
    if not isinstance(made, dict):
        raise UnusableAdapter(f"{path} is not a JSON object: it is damaged; {_AGAIN}")
    return made


def positive(path: Path, config: Mapping[str, Any], name: str, kind: type = int) -> None:
    """Raises UnusableAdapter where the field is no number above 0."""
    value = config.get(name)
    is_number = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
    if not is_number or not float(value or 0) > 0:
        shown = json.dumps(value)[:40]
        raise UnusableAdapter(
            f"{path} has {name} {shown}, which is not a number above 0: it is damaged; {_AGAIN}"
        )


def _check_config(path: Path, config: Mapping[str, Any]) -> None:
    if not isinstance(config.get("peft_type"), str):
        raise UnusableAdapter(
            f"{path} has no peft_type and is not the configuration of a PEFT adapter: {_AGAIN}"
        )
    if config["peft_type"] != "LORA":
        raise UnusableAdapter(
            f"{path} has peft_type {json.dumps(config['peft_type'])[:_SHOWN]}, and only LORA can be exported: give the "
            f"folder of a LoRA adapter, or merge this one with PEFT's merge_and_unload"
        )
    unknown = unknown_field(config)
    if unknown is not None:
        raise UnusableAdapter(
            f"{path} has {unknown[:_SHOWN]} {json.dumps(config[unknown])[:_SHOWN]}, which is not supported: use an adapter "
            f"of plain LoRA"
        )
    positive(path, config, "r")
    positive(path, config, "lora_alpha", float)
    for name in ("rank_pattern", "alpha_pattern"):
        pattern = config.get(name) or {}
        if not isinstance(pattern, dict):
            raise UnusableAdapter(f"{path} has a {name} that is not an object: it is damaged; {_AGAIN}")
        for module in pattern:
            positive(path, pattern, module, float)


def _check_magnitudes(path: Path, entries: Mapping[str, TensorEntry], wanted: bool) -> None:
    """PEFT would take the base's lengths for those that are missing, and say no more than a warning."""
    modules = {name.removesuffix(_B) for name in entries if name.endswith(_B)}
    found = {name.removesuffix(_MAGNITUDE) for name in entries if name.endswith(_MAGNITUDE)}
    for module in sorted(modules ^ found if wanted else found):
        lacks = "lacks" if wanted and module in modules else "has"
        raise UnusableAdapter(
            f"{path.parent / CONFIG_NAME} has use_dora {json.dumps(wanted)}, and {path.name} {lacks} "
            f"{module}{_MAGNITUDE}: {_AGAIN}"
        )


def _check_pairs(path: Path, entries: Mapping[str, TensorEntry]) -> None:
    for name, entry in entries.items():
        for mine, other, side, its_side in ((_A, _B, 0, 1), (_B, _A, 1, 0)):
            if not name.endswith(mine):
                continue
            if len(entry.shape) != 2 or 0 in entry.shape:
                raise UnusableAdapter(
                    f"{path}: {name} has the shape {list(entry.shape)}, and is not a matrix: {_AGAIN}"
                )
            partner = entries.get(name.removesuffix(mine) + other)
            if partner is None:
                raise UnusableAdapter(
                    f"{path} has {name} and not its {other[1:7]}: it is not whole; {_AGAIN}"
                )
            if len(partner.shape) == 2 and partner.shape[its_side] != entry.shape[side]:
                raise UnusableAdapter(
                    f"{path}: {name} has rank {entry.shape[side]}, its {other[1:7]} {partner.shape[its_side]}: "
                    f"{_AGAIN}"
                )
